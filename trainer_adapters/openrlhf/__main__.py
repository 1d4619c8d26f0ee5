"""`python -m rollsync.trainer_adapters.openrlhf`."""

from .launch import main

main()
