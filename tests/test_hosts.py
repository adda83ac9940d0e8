"""How processes meet, share work and tell each other; end_to_end/ has tests of real ones."""

import json

import jax
import numpy as np
import pytest
from jax._src import distributed

from rag_jax import hosts
from rag_jax.config import ConfigError


@pytest.mark.parametrize("given,message", [
    (("h:1", 2, None), "belong together"), ((None, 2, 0), "belong together"),
    (("h", 2, 0), "--coordinator=h: expected HOST:PORT"), (("h:1", 2, 2), "must be 0 to 1")])
def test_flags_that_do_not_fit_are_errors(given, message):
    with pytest.raises(ConfigError, match=message):
        hosts.connect(*given)


@pytest.mark.parametrize("environment,devices,found", [
    ({}, [], False), ({"SLURM_NTASKS": "4", "SLURM_PROCID": "1"}, [], True),
    ({"SLURM_NTASKS": "4"}, [], False),  # a batch script outside srun
    ({"SLURM_NTASKS": "1", "SLURM_PROCID": "0"}, [], False),
    ({}, ["/dev/accel0"], True), ({"JAX_PLATFORMS": "cpu"}, ["/dev/accel0"], False)])
def test_slurm_and_tpu_slices_are_recognised(monkeypatch, environment, devices, found):
    monkeypatch.setattr(hosts.glob, "glob", lambda pattern: [
        d for d in devices if d.startswith(pattern[:9])])
    monkeypatch.setattr(hosts.importlib.util, "find_spec", lambda name: name)
    assert hosts.is_cluster(environment) == found


def test_alone_everything_is_said_to_oneself():
    assert hosts.leads() and hosts.count() == 1 and hosts.exchange({"a": 1}) == [{"a": 1}]
    assert hosts.share(7) == slice(0, 7) and hosts.first(lambda: 3) == 3
    assert hosts.together(lambda rows: rows + 1, np.arange(3)).tolist() == [1, 2, 3]


class Store(dict):
    """The coordination service as seen by process 1 of 3, whose peers compute rows + 1 as well."""

    def __init__(self, rows):
        super().__init__()
        self.rows, self.deleted = rows, []

    def key_value_set(self, key, value):
        self[key] = value

    def blocking_key_value_get(self, key, timeout_ms):
        turn, process = key.split("/")[1:]
        if process == "1":
            return self[key]
        begin, end = (len(self.rows) * n // 3 for n in (int(process), int(process) + 1))
        return json.dumps((self.rows[begin:end] + 1).tolist())

    def key_value_delete(self, key):
        self.deleted.append(key)


@pytest.mark.parametrize("size", [1, 2, 3, 10])
def test_shares_cover_all_rows_once_and_come_back_in_order(monkeypatch, size):
    rows = np.arange(2 * size).reshape(size, 2)
    monkeypatch.setattr(jax, "process_count", lambda: 3)
    monkeypatch.setattr(distributed.global_state, "client", Store(rows))
    parts = []
    for process in (0, 2, 1):
        monkeypatch.setattr(jax, "process_index", lambda process=process: process)
        parts += np.arange(size)[hosts.share(size)].tolist()
    assert sorted(parts) == list(range(size))
    computed = []
    found = hosts.together(lambda part: computed.append(len(part)) or part + 1, rows)
    assert found.dtype == np.int32 and np.array_equal(found, rows + 1)
    assert sum(computed) < max(2, size), "a part of the rows only"


def test_process_0_goes_first(monkeypatch):
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    said = []
    monkeypatch.setattr(hosts, "wait", lambda: said.append("wait"))
    for process in (0, 1):
        monkeypatch.setattr(jax, "process_index", lambda process=process: process)
        assert hosts.first(lambda: said.append("make")) is None
    assert said == ["make", "wait", "wait", "make"]
