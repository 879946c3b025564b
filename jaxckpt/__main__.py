"""`python -m jaxckpt` is the command `jaxckpt`."""

from jaxckpt.cli import main

if __name__ == "__main__":
    main()
