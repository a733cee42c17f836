"""`python -m kvstore`: the same as the `kvstore` script."""

from kvstore.cli import main

if __name__ == "__main__":
    main()
