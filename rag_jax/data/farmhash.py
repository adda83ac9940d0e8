"""FarmHash's Fingerprint64, by which ORQA split its data sets into training and development.

Source: Google's FarmHash (Pike and Alakuijala), `farmhashna::Hash64`; TensorFlow's
`to_hash_bucket_fast` is this fingerprint modulo the number of buckets.
"""

_K0, _K1, _K2 = 0xC3A5C85C97CB3127, 0xB492B66FBE98F273, 0x9AE16A3B2F90404F
_ALL = (1 << 64) - 1


def held_out(question: str) -> bool:
    """Whether ORQA puts a question of a training file into the development set (one in ten).

    Source: Lee et al. 2019 (ORQA), its data preparation: bucket 0 of 10.
    """
    return fingerprint64(question.encode("utf-8")) % 10 == 0


def fingerprint64(data: bytes) -> int:
    """The 64-bit fingerprint of some bytes."""
    size = len(data)
    if size <= 16:
        return _up_to_16(data, size)
    mul = (_K2 + size * 2) & _ALL
    if size <= 32:
        a, b = _word(data, 0) * _K1, _word(data, 8)
        c, d = _word(data, size - 8) * mul, _word(data, size - 16) * _K2
        return _mix(_rotate(a + b, 43) + _rotate(c, 30) + d, a + _rotate(b + _K2, 18) + c, mul)
    if size <= 64:
        a, b = _word(data, 0) * _K2, _word(data, 8)
        c, d = _word(data, size - 8) * mul, _word(data, size - 16) * _K2
        y = _rotate(a + b, 43) + _rotate(c, 30) + d
        z = _mix(y, a + _rotate(b + _K2, 18) + c, mul)
        e, f = _word(data, 16) * mul, _word(data, 24)
        g, h = (y + _word(data, size - 32)) * mul, (z + _word(data, size - 24)) * mul
        return _mix(_rotate(e + f, 43) + _rotate(g, 30) + h, e + _rotate(f + a, 18) + g, mul)
    return _beyond_64(data, size)


def _up_to_16(data: bytes, size: int) -> int:
    mul = (_K2 + size * 2) & _ALL
    if size >= 8:
        a, b = (_word(data, 0) + _K2) & _ALL, _word(data, size - 8)
        return _mix(_rotate(b, 37) * mul + a, (_rotate(a, 25) + b) * mul, mul)
    if size >= 4:
        return _mix(size + (_half(data, 0) << 3), _half(data, size - 4), mul)
    if size:
        y = data[0] + (data[size >> 1] << 8)
        z = size + (data[-1] << 2)
        return _shift_mix(y * _K2 ^ z * _K0) * _K2 & _ALL
    return _K2


def _beyond_64(data: bytes, size: int) -> int:
    x, y = 81, (81 * _K1 + 113) & _ALL
    z = _shift_mix(y * _K2 + 113) * _K2 & _ALL
    v = w = (0, 0)
    x = (x * _K2 + _word(data, 0)) & _ALL
    for at in range(0, (size - 1) // 64 * 64, 64):
        x, y, z, v, w = _round(data, at, x, y, z, v, w, _K1, 1)
    mul = (_K1 + ((z & 0xFF) << 1)) & _ALL
    w = (w[0] + ((size - 1) & 63), w[1])
    v = (v[0] + w[0], v[1])
    w = (w[0] + v[0], w[1])
    x, y, z, v, w = _round(data, size - 64, x, y, z, v, w, mul, 9)
    return _mix(_mix(v[0], w[0], mul) + _shift_mix(y) * _K0 + z, _mix(v[1], w[1], mul) + x, mul)


def _round(data: bytes, at: int, x: int, y: int, z: int, v: tuple[int, int], w: tuple[int, int],
           mul: int, weight: int) -> tuple[int, int, int, tuple[int, int], tuple[int, int]]:
    """Takes in 64 bytes."""
    x = _rotate(x + y + v[0] + _word(data, at + 8), 37) * mul & _ALL
    y = _rotate(y + v[1] + _word(data, at + 48), 42) * mul & _ALL
    x ^= w[1] * weight & _ALL
    y = (y + v[0] * weight + _word(data, at + 40)) & _ALL
    z = _rotate(z + w[0], 33) * mul & _ALL
    v = _weak(data, at, v[1] * mul, x + w[0])
    w = _weak(data, at + 32, z + w[1], y + _word(data, at + 16))
    return z, y, x, v, w


def _weak(data: bytes, at: int, a: int, b: int) -> tuple[int, int]:
    w, x, y, z = (_word(data, at + 8 * i) for i in range(4))
    a = (a + w) & _ALL
    b = _rotate(b + a + z, 21)
    c = a
    a = (a + x + y) & _ALL
    return (a + z) & _ALL, (b + _rotate(a, 44) + c) & _ALL


def _mix(u: int, v: int, mul: int) -> int:
    u, v = u & _ALL, v & _ALL
    a = _shift_mix((u ^ v) * mul)
    return _shift_mix((v ^ a) * mul) * mul & _ALL


def _shift_mix(value: int) -> int:
    value &= _ALL
    return value ^ value >> 47


def _rotate(value: int, by: int) -> int:
    value &= _ALL
    return (value >> by | value << 64 - by) & _ALL


def _word(data: bytes, at: int) -> int:
    return int.from_bytes(data[at : at + 8], "little")


def _half(data: bytes, at: int) -> int:
    return int.from_bytes(data[at : at + 4], "little")
