"""How processes meet, share work and tell each other; end_to_end/ has tests of real ones."""

import json
import os
import socket

import jax
import numpy as np
import pytest
from jax._src import distributed
from jax._src.clusters import ClusterEnv, SlurmCluster

from rag_jax import hosts, searching
from rag_jax.config import ConfigError
from rag_jax.errors import UserError
from rag_jax.retrieval.protocol import SearchResult


def test_what_is_said_does_not_control_the_terminal(capsys):
    hosts.say("a\x1b[31m\nb")
    hosts.warn("c\x07")
    assert capsys.readouterr() == ("a\\x1b[31m\nb\n", "warning: c\\x07\n")


@pytest.mark.parametrize("given,message", [
    (("h:1", 2, None), "belong together"), ((None, 2, 0), "belong together"),
    (("h", 2, 0), "--coordinator=h: expected HOST:PORT"), (("h:1", 2, 2), "must be 0 to 1"),
    ((":1", 2, 0), "=:1: expected HOST:PORT"), (("h:0", 2, 0), "a port from 1 to 65535"),
    (("h:65536", 2, 0), "a port from 1 to 65535"),
    (("h:1", 0, 0), "--num_processes=0: must be at least 1"),
    (("h:1", 2, 0, 0), "--heartbeat=0: must be at least 1 second")])
def test_flags_that_do_not_fit_are_errors(started, given, message):
    """Without a host it waited for five minutes; with no heartbeat all processes aborted."""
    with pytest.raises(ConfigError, match=message):
        hosts.connect(*given)
    assert not started


@pytest.mark.parametrize("shared", [False, True])
def test_a_port_that_is_taken_is_refused(started, shared):
    """jaxlib crashed, or shared the port with the process 0 of another job, as both allow it."""
    with socket.socket() as other:
        if shared:
            other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        other.bind(("", 0))
        other.listen()
        coordinator = f"localhost:{other.getsockname()[1]}"
        with pytest.raises(ConfigError, match=f"--coordinator={coordinator}: process 0 cannot lis"):
            hosts.connect(coordinator, 2, 0)
        assert not started
        hosts.connect(coordinator, 2, 1)  # whose port it is not
    hosts.connect(coordinator, 2, 0)
    assert [process for _, _, process, _ in started] == [1, 0]


def test_how_long_processes_wait_at_the_start_is_said(monkeypatch, started, capsys):
    """One that was refused before it could join was waited for, nobody knew how long."""
    monkeypatch.setattr(jax.distributed, "initialize", lambda *given, **settings: started.append(
        settings["initialization_timeout"]))
    hosts.connect("h:1", 2, 1)
    assert f"waits for the others at h:1, {started[0]} s at most\n" in capsys.readouterr().out


SRUN = {"SLURM_JOB_ID": "70000", "SLURM_STEP_NODELIST": "node[01-04]", "SLURM_NTASKS": "4",
        "SLURM_PROCID": "1", "SLURM_LOCALID": "0"}


@pytest.mark.parametrize("missing", [None, *SRUN])
def test_slurm_is_recognised_by_all_that_jax_asks_of_it(monkeypatch, missing):
    """A batch script outside srun has no step; jax would not know it and wait for the others."""
    environment = {name: value for name, value in SRUN.items() if name != missing}
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert hosts.is_slurm(environment) == SlurmCluster.is_env_present() == (missing is None)
    assert not hosts.is_slurm({**SRUN, "SLURM_NTASKS": "1"})
    assert not hosts.is_slurm({**SRUN, "SLURM_NTASKS": ""})


def test_the_shell_of_an_allocation_is_one_process(monkeypatch, started):
    """salloc's interactive step keeps the allocation's number of tasks: one command waited for
    three others that nobody had started, and said nothing."""
    for name, value in {**SRUN, "SLURM_STEP_NUM_TASKS": "1"}.items():
        monkeypatch.setenv(name, value)
    hosts.connect(None, None, None)
    assert not started
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "4")
    hosts.connect(None, None, None)
    assert started


def test_slurms_tasks_say_that_they_wait_and_what_to_do_if_there_are_no_others(
        monkeypatch, started, capsys):
    for name, value in SRUN.items():
        monkeypatch.setenv(name, value)
    hosts.connect(None, None, None)
    assert capsys.readouterr().out == (
        "process 1 of 4: waits for Slurm's other tasks, 300 s at most; a command by itself has "
        "--num_processes=1\n")


@pytest.mark.parametrize("platforms,devices,found", [
    (None, [], False), (None, ["/dev/accel0"], True), ("", ["/dev/vfio/0"], True),
    ("tpu,cpu", ["/dev/accel0"], True), ("cpu", ["/dev/accel0"], False)])
def test_tpu_chips_are_recognised(monkeypatch, platforms, devices, found):
    monkeypatch.setattr(hosts.glob, "glob", lambda pattern: [
        d for d in devices if d.startswith(pattern[:9])])
    monkeypatch.setattr(hosts.importlib.util, "find_spec", lambda name: name)
    environment = {} if platforms is None else {"JAX_PLATFORMS": platforms}
    assert hosts.has_tpus(environment) == found


@pytest.fixture
def started(monkeypatch):
    """What jax.distributed.initialize was called with, which does nothing here."""
    calls = []
    monkeypatch.setattr(jax.distributed, "initialize",
                        lambda *given, **settings: calls.append(given))
    monkeypatch.setattr(hosts, "has_tpus", lambda environment: False)
    monkeypatch.setenv("PJRT_NPROC", "3")  # for this test, and as it was after it
    kept = jax.config.jax_enable_preemption_service
    yield calls
    jax.config.update("jax_enable_preemption_service", kept)


@pytest.mark.parametrize("environment,local", [
    ({}, None), ({"SLURM_TASKS_PER_NODE": "1(x4)"}, []),
    ({"SLURM_TASKS_PER_NODE": "4", "SLURM_STEP_TASKS_PER_NODE": "1(x4)"}, []),
    ({"SLURM_TASKS_PER_NODE": "1", "SLURM_STEP_TASKS_PER_NODE": "2(x2)"}, None),
    ({"SLURM_STEP_TASKS_PER_NODE": "1,2"}, None), ({"SLURM_STEP_TASKS_PER_NODE": "12"}, None),
    ({"SLURM_STEP_TASKS_PER_NODE": "1(x4)", "JAX_LOCAL_DEVICE_IDS": "0,1"}, None)])
def test_slurms_only_task_of_a_node_has_all_its_gpus(monkeypatch, started, environment, local):
    for name, value in {**SRUN, **environment}.items():
        monkeypatch.setenv(name, value)
    hosts.connect(None, None, None)
    assert started == [(None, None, None, local)]
    found = ClusterEnv.auto_detect_unset_distributed_params(None, None, None, local, None, 1)
    assert found == (found[0], 4, 1, [0] if local is None else [])


def test_a_coordinator_leaves_slurms_only_task_of_a_node_its_gpus(monkeypatch, started):
    """As of `srun --pty bash` on each node: jax took the first GPU of four."""
    for name, value in {**SRUN, "SLURM_NTASKS": "1", "SLURM_TASKS_PER_NODE": "1"}.items():
        monkeypatch.setenv(name, value)
    hosts.connect("h:1", 2, 1)
    assert started == [("h:1", 2, 1, [])]


def test_each_step_of_a_slurm_job_meets_at_a_port_of_its_own(monkeypatch, started):
    """The second on a node, an evaluation beside the training, ended the first."""
    ports = []
    for step in (None, "0", "1", "2"):
        for name, value in {**SRUN, "JAX_COORDINATOR_PORT": "", "SLURM_STEP_ID": step}.items():
            monkeypatch.setenv(name, value or "")
        monkeypatch.delenv("JAX_COORDINATOR_PORT")
        hosts.connect(None, None, None)
        ports.append(int(os.environ["JAX_COORDINATOR_PORT"]))
    assert ports == [61808, 61808, 61905, 62002], "jax's own for the first"
    hosts.connect(None, None, None)
    assert os.environ["JAX_COORDINATOR_PORT"] == str(ports[-1]), "whoever sets one has it"


def test_one_process_can_be_told_that_it_is_alone(monkeypatch, started):
    for name, value in SRUN.items():
        monkeypatch.setenv(name, value)
    hosts.connect(None, 1, None)
    assert not started


def test_chips_without_a_slice_are_an_error_that_says_what_to_do(monkeypatch, started):
    monkeypatch.setattr(hosts, "has_tpus", lambda environment: True)

    def initialize(*given, **settings):
        raise ValueError("coordinator_address should be defined.")

    monkeypatch.setattr(jax.distributed, "initialize", initialize)
    with pytest.raises(ConfigError, match="coordinator_address.*give --num_processes=1"):
        hosts.connect(None, None, None)


@pytest.mark.parametrize("devices", ["eight", "-1", "", "1.5"])
def test_virtual_devices_are_a_number(monkeypatch, devices):
    monkeypatch.setenv("JAX_NUM_CPU_DEVICES", devices)
    with pytest.raises(ConfigError, match=f"JAX_NUM_CPU_DEVICES={devices} in the environment"):
        hosts.connect(None, None, None)


@pytest.mark.parametrize("given", [("h:1", 2, 1), (None, None, None)])
def test_virtual_devices_have_threads(monkeypatch, started, given):
    """Of a process by itself too: its devices also wait for each other."""
    monkeypatch.setattr(hosts.os, "cpu_count", lambda: 2)
    monkeypatch.setenv("JAX_NUM_CPU_DEVICES", "8")
    hosts.connect(*given)
    assert hosts.os.environ["PJRT_NPROC"] == "3", "as the user wants it"
    monkeypatch.delenv("PJRT_NPROC")
    hosts.connect(*given)
    assert hosts.os.environ["PJRT_NPROC"] == "32"
    monkeypatch.delenv("PJRT_NPROC")
    monkeypatch.delenv("JAX_NUM_CPU_DEVICES")
    hosts.connect(*given)
    assert "PJRT_NPROC" not in hosts.os.environ, "one device, or not CPUs"


def test_alone_everything_is_said_to_oneself():
    assert hosts.leads() and hosts.count() == 1 and hosts.exchange({"a": 1}) == [{"a": 1}]
    assert hosts.share(7) == slice(0, 7) and hosts.first(lambda: 3) == 3
    assert hosts.together(lambda rows: rows + 1, np.arange(3), 1).tolist() == [1, 2, 3]
    assert hosts.in_messages(lambda rows: rows, np.zeros((0, 2)), 1).shape == (0, 2)


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
    found = hosts.together(lambda part: computed.append(len(part)) or part + 1, rows, 2)
    assert found.dtype == np.int32 and np.array_equal(found, rows + 1)
    assert sum(computed) < max(2, size), "a part of the rows only"


def test_messages_stay_below_grpcs_limit_whatever_k_is(monkeypatch):
    """Both ways in which processes share a search, with ids and scores of the longest form."""
    k, rows = 1000, np.zeros((400, 2), np.float32)
    said = []
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    monkeypatch.setattr(jax, "process_index", lambda: 0)
    monkeypatch.setattr(hosts, "exchange",
                        lambda value: said.append(len(json.dumps(value))) or [value, value])

    class Longest:
        def search(self, queries, k):
            ids = np.full((len(queries), k), 2**31 - 1, np.int32) - np.arange(k, dtype=np.int32)
            return SearchResult(ids, np.full(ids.shape, -1.2345678e-30, np.float32))

    for Longest.division in ("queries", "passages"):
        assert searching.search(Longest(), rows, k).shape == (400, k)
    assert max(said) < 4 * 2**20 < sum(said)


def test_processes_of_another_command_are_refused_by_name(monkeypatch):
    """They hung, or saved a checkpoint that nobody could read, and the disk was blamed."""
    monkeypatch.setattr(hosts, "connected", lambda: True)
    monkeypatch.setattr(hosts, "exchange",
                        lambda mine: [mine, {**mine, "--config.seed": "4", "--run": "fid"}])
    with pytest.raises(ConfigError, match="different values of --config.seed, --run; start all"):
        hosts.check_same({"--config.seed": "3", "--workdir": "w"})
    monkeypatch.setattr(hosts, "exchange", lambda mine: [mine, mine])
    hosts.check_same({"--config.seed": "3"})


def test_process_0_goes_first(monkeypatch):
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    said = []
    monkeypatch.setattr(hosts, "exchange", lambda value: said.append("wait") or [value])
    for process in (0, 1):
        monkeypatch.setattr(jax, "process_index", lambda process=process: process)
        assert hosts.first(lambda: said.append("make")) is None
    assert said == ["make", "wait", "wait", "make"]


def test_what_fails_in_process_0_fails_in_all(monkeypatch):
    """The others would wait for ever, or go on with half of what process 0 was to make."""
    def make():
        raise ValueError("damaged line 3")

    heard = []
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    monkeypatch.setattr(hosts, "exchange", lambda value: heard.append(value) or heard[:1])
    monkeypatch.setattr(jax, "process_index", lambda: 0)
    with pytest.raises(ValueError, match="^damaged line 3$"):
        hosts.first(make)
    monkeypatch.setattr(jax, "process_index", lambda: 1)
    with pytest.raises(UserError, match="process 0: ValueError: damaged line 3"):
        hosts.first(lambda: pytest.fail("process 0 has made nothing"))


def test_what_fails_in_one_process_fails_in_all_that_do_it_together(monkeypatch):
    monkeypatch.setattr(hosts, "exchange", lambda value: [value, "process 1: OSError: disk full"])
    with pytest.raises(UserError, match="^process 1: OSError: disk full$"):
        hosts.each(lambda: "its share")
    said = []
    monkeypatch.setattr(hosts, "exchange", said.append)
    with pytest.raises(ZeroDivisionError):
        hosts.each(lambda: 1 / 0)
    assert said == ["process 0: ZeroDivisionError: division by zero"]


class Leaving:
    """The key-value store of a job, in which the values of processes that are gone never come."""

    def __init__(self, gone=()):
        self.values, self.gone, self.waits = {}, gone, []

    def key_value_set(self, key, value):
        self.values[key] = value

    def blocking_key_value_get(self, key, milliseconds):
        self.waits.append(milliseconds)
        if int(key.rpartition("/")[2]) in self.gone:
            raise TimeoutError(key)
        return ""


@pytest.mark.parametrize("process, gone, waits", [(0, (), 2), (0, (1,), 1), (1, (), 0)])
def test_process_0_lets_the_others_say_why_they_fail(monkeypatch, process, gone, waits):
    """Messages go through it: it ended, and the others were aborted in the middle of theirs."""
    store, ended = Leaving(gone), []
    monkeypatch.setattr(hosts, "_key_value_store", lambda: store)
    monkeypatch.setattr(jax, "process_count", lambda: 3)
    monkeypatch.setattr(jax, "process_index", lambda: process)
    monkeypatch.setattr(os, "_exit", ended.append)
    hosts.leave("error: why")
    assert ended == [1] and len(store.waits) == waits
    assert list(store.values) == [f"rag_jax/left/{process}"]
    assert all(0 < wait <= 1000 * hosts._LEAVE_SECS for wait in store.waits)


def test_processes_with_other_numbers_of_devices_are_refused(monkeypatch, started):
    """A batch is split over all devices in equal parts."""
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    monkeypatch.setattr(hosts, "exchange", lambda mine: [mine, "3"])
    with pytest.raises(ConfigError, match="different numbers of devices, 8, 3: start all with"):
        hosts.connect("h:1", 2, 1)
    monkeypatch.setattr(hosts, "exchange", lambda mine: [mine, mine])
    hosts.connect("h:1", 2, 1)


def test_the_key_value_store_is_where_it_was_in_jax_0_10(monkeypatch):
    """It has no public name: a version that moves it must fail here, and say so to its users."""
    assert hasattr(distributed.global_state, "client")
    for name in ("key_value_set", "blocking_key_value_get", "key_value_delete"):
        assert hasattr(jax._src.lib._jax.DistributedRuntimeClient, name)
    assert hosts._key_value_store() is distributed.global_state.client
    monkeypatch.delattr(distributed, "global_state")
    with pytest.raises(RuntimeError, match=f"jax {jax.__version__} has another key-value store"):
        hosts._key_value_store()
