"""Times covey beside its peers.

make bench                                       both parts, about three quarters of an hour on two cores
.venv/bin/python benchmarks/bench.py control     one part: `language` or `control`
.venv/bin/python benchmarks/bench.py control --seeds 1 --rounds 1    a short one; --help names each part's options
"""

import sys


def main() -> None:
    chosen, options = sys.argv[1:2], sys.argv[2:]
    if chosen and chosen[0] not in ("language", "control"):
        sys.exit(__doc__)
    if chosen != ["control"]:
        import language

        language.main(options)
    if chosen != ["language"]:
        import control

        control.main(options)


if __name__ == "__main__":
    main()
