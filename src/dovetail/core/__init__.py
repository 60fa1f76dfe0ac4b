"""The nouns: plain, frozen, typed data that every other part passes around. No torch here."""
