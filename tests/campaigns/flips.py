"""One byte of a file changed, and put back."""


def files_of(folder):
    """All files below a folder that have a byte to change, in one order."""
    return sorted(f for f in folder.rglob("*") if f.is_file() and f.stat().st_size)


def flip(file, rng):
    """Changes one bit of a file; returns the function that puts it back."""
    place, bit = rng.randrange(file.stat().st_size), 1 << rng.randrange(8)

    def write(byte):
        with open(file, "r+b") as data:
            data.seek(place)
            before = data.read(1)
            data.seek(place)
            data.write(bytes([before[0] ^ bit]) if byte is None else byte)
        return before

    before = write(None)
    return lambda: write(before)
