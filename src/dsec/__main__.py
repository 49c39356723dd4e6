"""``python -m dsec``: the same as ``dsec``."""

from dsec.main import main

if __name__ == "__main__":
    main()
