"""Ranks that meet by name: a rank that failed before a meeting does not shift the later ones."""

from __future__ import annotations

import json
from datetime import timedelta
from typing import Any

LIMIT = timedelta(seconds=60)


class Meeting:
    """Of ``size`` ranks over a store of torch.distributed; every name is used once."""

    def __init__(self, rank: int, size: int, store: Any) -> None:
        self.rank, self.size, self._store = rank, size, store

    def wait(self, name: str) -> None:
        """Return when all ranks are here; raises an error of the store after a minute."""
        if self._store.add(name, 1) == self.size:
            self._store.set(f"{name}/all", "here")
        self._store.wait([f"{name}/all"], LIMIT)

    def decided(self, name: str, choice: bool) -> bool:
        """Return the first rank's choice."""
        if self.rank == 0:
            self._store.set(name, json.dumps(choice))
        return bool(json.loads(self._value(name)))

    def gathered(self, name: str, value: Any) -> list[Any]:
        """Return what each rank gives, which JSON can hold."""
        self._store.set(f"{name}/{self.rank}", json.dumps(value))
        return [json.loads(self._value(f"{name}/{rank}")) for rank in range(self.size)]

    def _value(self, name: str) -> Any:
        self._store.wait([name], LIMIT)
        return self._store.get(name)
