"""How far a chain of correctly rounded operations may be off: running error analysis (Higham 2002, section 3.3)."""

from __future__ import annotations

import torch

OFTEN_ENOUGH = 1 + 2**-20  # the bound itself is computed in float64


class Rounded:
    """A float64 value, and a bound of the error that a computation in a shorter format has made so far.

    Without fused multiply-add each operation returns its exact result rounded to nearest, so it adds at most half an
    eps of the result's magnitude (half the least subnormal number, where results are that small) to the
    errors of its operands, which it passes on by its derivative. `fits` tells the elements where no operation
    overflowed: only for these is there a bound.
    """

    def __init__(self, value, arithmetic, error=None, fits=None):
        self.value, self.arithmetic = value, arithmetic
        self.error = torch.zeros_like(value) if error is None else error
        self.fits = value.isfinite() if fits is None else fits

    def _rounded(self, value, error, fits, dtype=None):
        info = torch.finfo(dtype or self.arithmetic)
        size = value.abs() + error
        error = (error + info.eps / 2 * size + info.smallest_normal * info.eps) * OFTEN_ENOUGH
        return Rounded(value, self.arithmetic, error, fits & (value.abs() + error < info.max))

    def _other(self, other):
        """A constant is rounded to the arithmetic's type, too."""
        if isinstance(other, Rounded):
            return other
        value = torch.full_like(self.value, other)
        exact = float(torch.tensor(other, dtype=self.arithmetic)) == other
        constant = Rounded(value, self.arithmetic)
        return constant if exact else constant._rounded(value, constant.error, constant.fits)

    def __add__(self, other):
        o = self._other(other)
        return self._rounded(self.value + o.value, self.error + o.error, self.fits & o.fits)

    def __sub__(self, other):
        return self + -self._other(other)

    def __neg__(self):
        return Rounded(-self.value, self.arithmetic, self.error, self.fits)

    def __mul__(self, other):
        o = self._other(other)
        error = self.value.abs() * o.error + o.value.abs() * self.error + self.error * o.error
        return self._rounded(self.value * o.value, error, self.fits & o.fits)

    def __truediv__(self, other):
        o = self._other(other)
        ratio, least = self.value / o.value, o.value.abs() - o.error
        error = (self.error + ratio.abs() * o.error) / least
        fits = self.fits & o.fits & (least > 0)
        return self._rounded(ratio.where(fits, 0), error.where(fits, torch.inf), fits)

    def sqrt(self):
        root = self.value.sqrt()
        error = torch.minimum(self.error.sqrt(), self.error / root.clamp_min(1e-300))
        return self._rounded(root, error, self.fits)

    __radd__, __rmul__ = __add__, __mul__

    def __rsub__(self, other):
        return -self + other

    def stored(self, dtype):
        """Rounded once more, to the format that it is kept in."""
        if dtype == self.arithmetic:
            return self
        return self._rounded(self.value, self.error, self.fits, dtype)


def zero_of(number):
    """Exactly 0, whatever the tensor or `Rounded` number is."""
    if isinstance(number, Rounded):
        return Rounded(torch.zeros_like(number.value), number.arithmetic)
    return torch.zeros_like(number)


def plus_nothing_of(number, other):
    """number + 0 * other: the number itself, unless the other one is not finite."""
    if isinstance(number, Rounded):
        value = number.value + 0 * other.value
        return Rounded(value, number.arithmetic, number.error, number.fits & other.fits)
    return number + 0 * other


def assert_within(result, expected, bound, times=1):
    """|result - expected| <= times * bound wherever there is one; the value is the bound's own unless given."""
    wanted = bound.value if expected is None else expected.double()
    error = (result.double() - wanted).abs()
    assert result.shape == wanted.shape
    bad = bound.fits & ~(error <= times * bound.error)
    if bool(bad.any()):
        worst = int((error / bound.error).where(bad, 0).argmax())
        got, want, most = (t.flatten()[worst].item() for t in (result, wanted, times * bound.error))
        raise AssertionError(f"element {worst}: got {got}, want {want}, bound {most}, in {result.dtype}")
