"""python -m psa_cupy [demo|check|bench|info]."""

import argparse
import sys

from psa_cupy.cli import bench, check, demo, info

_COMMANDS = {
    "demo": (demo, "forward and backward over the real YOLO shapes (the default)"),
    "check": (check, "every kernel, dtype and a range of shapes against float64, on this machine"),
    "bench": (bench, "time psa_cupy beside what else is installed"),
    "info": (info, "versions, device, compiler, cache"),
}


def main(arguments: list[str] | None = None) -> int:
    """Run a command; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m psa_cupy", description=__doc__)
    commands = parser.add_subparsers(dest="command", metavar="demo|check|bench|info")
    for name, (module, help_text) in _COMMANDS.items():
        module.add_arguments(commands.add_parser(name, help=help_text, description=help_text))
    argv = sys.argv[1:] if arguments is None else arguments
    if not argv or (argv[0].startswith("-") and argv[0] not in ("-h", "--help")):
        argv = ["demo", *argv]
    parsed = parser.parse_args(argv)
    return _COMMANDS[parsed.command][0].run(parsed)


if __name__ == "__main__":
    sys.exit(main())
