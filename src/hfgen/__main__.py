"""``python -m hfgen`` is the command ``hfgen``."""

from hfgen.cli import main

if __name__ == "__main__":
    main()
