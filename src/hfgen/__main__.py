"""``python -m hfgen`` is the command ``hfgen``."""

from .tools.cli import main

if __name__ == "__main__":
    main()
