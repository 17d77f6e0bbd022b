"""Options that several partitioners take."""

from __future__ import annotations

from avgpipe.planning.profile import Profile


def micro_batch_size_of(profile: Profile, asked: float | None) -> float:
    """What ``micro_batch_size`` means."""
    if asked is None:
        return profile.micro_batch_sizes[-1]
    if isinstance(asked, bool) or not isinstance(asked, (int, float)) or not asked > 0:
        raise ValueError(f"micro_batch_size={asked!r}: must be a number of samples above 0")
    return asked


def transfer_notes(bytes_per_s: float) -> tuple[str, ...]:
    """That transfers are free, where they are."""
    if bytes_per_s < float("inf"):
        return ()
    return ("transfers count as free: the profile has no link, give link= or levels=",)


def check_count(name: str, value: int) -> None:
    if type(value) is not int or value < 1:
        raise ValueError(f"{name}={value!r}: must be an int of at least 1")
