"""``python -m kvfs`` is ``kvfs``."""

from kvfs.cli import main

if __name__ == "__main__":
    main()
