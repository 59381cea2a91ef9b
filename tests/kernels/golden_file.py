"""Golden files of generated code: sections in brackets, each a number and a mnemonic to a line."""

from collections import Counter


def sections(text):
    """Counter of each named section of a golden file."""
    found = {}
    for line in text.splitlines():
        if line.startswith("["):
            found[line.strip("[]")] = counts = Counter()
        elif line and not line.startswith("#"):
            number, mnemonic = line.split()
            counts[mnemonic] = int(number)
    return found
