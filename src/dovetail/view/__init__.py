"""What people look at: tables, timelines in the terminal, pictures, traces for Perfetto. Import the module you need."""
