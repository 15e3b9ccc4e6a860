"""The first lines of the `pagemill` command: what can go wrong before it can say anything."""

import sys


def main() -> None:
    """Run the command line of this process; never returns."""
    try:
        # It takes a quarter of a second, in which one may press Ctrl-C.
        from pagemill.cli.command import main as run  # noqa: PLC0415
    except KeyboardInterrupt:
        sys.exit(130)
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("pagemill"):
            raise
        sys.exit(
            f"pagemill: the command cannot run here: {error.name} is not installed; in Pagemill's "
            "source tree: pip install -c constraints.txt '.[client]'"
        )
    run()


if __name__ == "__main__":
    main()
