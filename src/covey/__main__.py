"""The command `covey`, also as `python -m covey`."""

import os
import sys


def main() -> None:
    """Run the command line; Ctrl-C while its modules are still imported leaves no traceback."""
    if sys.platform == "win32":
        sys.exit("error: covey runs on Linux and macOS: on Windows, install it in WSL (wsl --install)")
    if not sys.stderr.isatty():  # in a log, the progress bars of other libraries would be one long line
        for name in ("TQDM_DISABLE", "HF_HUB_DISABLE_PROGRESS_BARS"):
            os.environ.setdefault(name, "1")
    try:
        if "_ARGCOMPLETE" in os.environ:  # a shell asks which words may follow
            from covey.cli import completion

            completion.answer()
        from covey.cli import main as command
        from covey.runtime.interrupts import leave

        leave(command.main())
    except KeyboardInterrupt:
        print("\ninterrupted", file=sys.stderr)
        sys.exit(130)


if __name__ == "__main__":
    main()
