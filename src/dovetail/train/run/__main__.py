"""`python -m dovetail.train.run`, for use under torchrun."""

from .launcher import main

main()
