"""How a process detects how it was started, from the variables of Slurm 22.05, and its number of cores."""
import os
import sys

import pytest

from common import launch
from common.errors import UsageError

# a task of `srun -N2 -n3 --distribution=arbitrary --nodelist=cook1,cook1,cook2`, the only one on the second node
TASK = {"SLURM_CPUS_ON_NODE": "1", "SLURM_JOB_ID": "3", "SLURM_LOCALID": "0", "SLURM_NNODES": "2", "SLURM_NODEID": "1",
        "SLURM_NTASKS": "3", "SLURM_PROCID": "2", "SLURM_STEP_ID": "0", "SLURM_STEP_NODELIST": "cook[1-2]",
        "SLURM_STEP_NUM_NODES": "2", "SLURM_STEP_NUM_TASKS": "3", "SLURM_STEP_TASKS_PER_NODE": "2,1",
        "SLURM_TASK_PID": "9585"}
# the shell of `srun -n2 --pty bash`
SHELL = {"SLURM_CPUS_ON_NODE": "2", "SLURM_JOB_ID": "4", "SLURM_LOCALID": "0", "SLURM_NNODES": "1", "SLURM_NODEID": "0",
         "SLURM_NTASKS": "2", "SLURM_PROCID": "0", "SLURM_STEP_ID": "0", "SLURM_STEP_NODELIST": "cook1",
         "SLURM_STEP_NUM_NODES": "1", "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_TASKS_PER_NODE": "2",
         "SLURM_TASK_PID": "9643"}
# the shell of `salloc -N2` with LaunchParameters=use_interactive_step: no SLURM_NTASKS
INTERACTIVE = {"SLURM_CPUS_ON_NODE": "1", "SLURM_JOB_ID": "3", "SLURM_LOCALID": "0", "SLURM_NNODES": "2",
               "SLURM_NODEID": "0", "SLURM_PROCID": "0", "SLURM_STEP_ID": "4294967290", "SLURM_STEP_NODELIST": "cook1",
               "SLURM_STEP_NUM_NODES": "1", "SLURM_STEP_NUM_TASKS": "1", "SLURM_STEP_TASKS_PER_NODE": "1",
               "SLURM_TASK_PID": "13133"}
# a batch script of `sbatch -N2 -n2`
BATCH = {"SLURM_CPUS_ON_NODE": "1", "SLURM_JOB_ID": "4", "SLURM_LOCALID": "0", "SLURM_NNODES": "2", "SLURM_NODEID": "0",
         "SLURM_NTASKS": "2", "SLURM_PROCID": "0", "SLURM_TASK_PID": "11510"}
ALONE = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "localhost",
         "MASTER_PORT": "0"}

SLURM = pytest.mark.skipif(sys.platform == "win32", reason="scontrol is a shell script here; Slurm needs Linux")


@pytest.fixture
def environment(alone, monkeypatch):
    """Set variables in an environment without a launcher's."""
    def update(variables):
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
    return update


@pytest.mark.parametrize("env, group, expected", [
    (TASK, None, True),
    (SHELL, 9643, True),  # srun -n2 --pty python, or a script that starts python
    (SHELL, 9653, False),  # python in the shell of srun -n2 --pty bash
    (INTERACTIVE, 13134, False),
    (INTERACTIVE, None, False),  # a notebook's kernel, say
    (BATCH, None, False),
    ({}, 1, False)])
def test_only_what_a_parallel_step_started_is_a_task(env, group, expected):
    assert launch.is_task(env, group) == expected


@pytest.mark.parametrize("counts, node, expected", [
    ("4", 0, 4), ("2,1", 0, 2), ("2,1", 1, 1), ("2(x3),1", 2, 2), ("2(x3),1", 3, 1), ("1,12(x10)", 10, 12)])
def test_the_tasks_of_a_node_are_counted_exactly(counts, node, expected):
    env = {"SLURM_STEP_TASKS_PER_NODE": counts, "SLURM_NODEID": str(node)}
    assert launch.slurm_local_world_size(env) == expected


def test_jobs_and_steps_side_by_side_have_ports_of_their_own():
    ports = {launch.step_port(job, step) for job in range(123_456, 124_456) for step in range(20)}
    assert len(ports) == 20_000
    assert min(ports) > 1023 and max(ports) < 32768  # neither reserved nor ephemeral
    assert launch.step_port(7, 4294967290) in range(12000 + 7 * 20, 12000 + 8 * 20)  # an interactive step


def test_a_task_of_slurm_gets_the_variables_of_torch(environment):
    """With MASTER_ADDR set, scontrol is not needed: containers lack it."""
    environment(TASK | {"MASTER_ADDR": "head", "PATH": "", "SLURM_TASK_PID": str(os.getpid())})
    assert launch.launch_environment() == {"RANK": "2", "WORLD_SIZE": "3", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1",
                                           "MASTER_ADDR": "head", "MASTER_PORT": "12060"}
    assert launch.local_world_size() == 1
    environment({"MASTER_PORT": "29500", "SLURM_NODEID": "0"})
    assert launch.launch_environment()["MASTER_PORT"] == "29500"
    assert launch.local_world_size() == 2


@SLURM
def test_the_first_host_of_the_step_is_the_master(environment, tmp_path):
    environment(TASK | {"PATH": str(tmp_path), "SLURM_TASK_PID": str(os.getpid())})
    (tmp_path / "scontrol").write_text("#!/bin/sh\n[ \"$*\" = 'show hostnames cook[1-2]' ] || exit 1\n"
                                       "printf 'cook1\\ncook2\\n'\n")
    (tmp_path / "scontrol").chmod(0o755)
    assert launch.launch_environment()["MASTER_ADDR"] == "cook1"


@SLURM
def test_without_scontrol_the_error_names_the_remedy(environment, tmp_path):
    environment(TASK | {"PATH": str(tmp_path), "SLURM_TASK_PID": str(os.getpid())})
    wanted = r"^scontrol cannot name the first host of cook\[1-2\]; set MASTER_ADDR to its name$"
    with pytest.raises(UsageError, match=wanted):
        launch.launch_environment()
    (tmp_path / "scontrol").write_text("#!/bin/sh\nexit 1\n")  # it is there, and finds no slurm.conf
    (tmp_path / "scontrol").chmod(0o755)
    with pytest.raises(UsageError, match=wanted):
        launch.launch_environment()


@pytest.mark.parametrize("variables", [INTERACTIVE, BATCH, {}])
def test_plain_python_is_a_group_of_one_in_an_interactive_step_and_a_batch_script(environment, variables):
    environment(variables)
    assert launch.launch_environment() == ALONE
    assert launch.local_world_size() == 1


def test_another_launcher_has_the_last_word_under_slurm(environment):
    environment(TASK | ALONE | {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "4"})
    assert launch.launch_environment() == {}
    assert launch.local_world_size() == 4


@pytest.mark.parametrize(("variables", "said"), [
    ({"RANK": "0"}, "^RANK is set, but WORLD_SIZE is not; "),
    ({"RANK": "0", "WORLD_SIZE": "1"}, "^RANK is set, but MASTER_ADDR is not; "),
    ({"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost"}, "^RANK is set, but MASTER_PORT is not; "),
    (ALONE | {"RANK": "4", "WORLD_SIZE": "4"}, "^RANK is 4, but WORLD_SIZE is 4; ranks count from 0$"),
    (ALONE | {"RANK": "$SLURM_PROCID"}, r"^RANK is '\$SLURM_PROCID', which is not a number from 0 to 65535$"),
    (ALONE | {"MASTER_PORT": "tcp://head:1"}, "^MASTER_PORT is 'tcp://head:1', which is not a number from 0 to 65535$"),
    (ALONE | {"MASTER_PORT": "65536"}, "^MASTER_PORT is '65536', which is not a number from 0 to 65535$"),
    (TASK | {"MASTER_PORT": "99999"}, "^MASTER_PORT is '99999', which is not a number from 0 to 65535$"),
    (ALONE | {"LOCAL_RANK": ""}, "^LOCAL_RANK is '', which is not a number from 0 to 65535$"),
    (BATCH | {"WORLD_SIZE": "2", "MASTER_ADDR": "cook1"}, "^WORLD_SIZE is 2, but RANK is not set; ")])
def test_a_part_of_a_launchers_variables_is_refused(environment, variables, said):
    environment(variables)
    with pytest.raises(UsageError, match=said):
        launch.launch_environment()


@pytest.mark.parametrize("variables", [{"RANK": ""}, {"WORLD_SIZE": "1"}, {"MASTER_ADDR": "head"}, {"WORLD_SIZE": ""}])
def test_variables_that_a_shell_left_empty_are_not_set(environment, variables):
    environment(variables)
    assert launch.launch_environment() == ALONE


@pytest.mark.parametrize("variables, own, launcher, expected", [
    ({"LOCAL_WORLD_SIZE": "4"}, 32, 32, 8),  # torchrun: all share what the launcher has
    ({"LOCAL_WORLD_SIZE": "4"}, 8, 32, 8),  # torchrun --numa-binding: cores of their own are not divided again
    ({"LOCAL_WORLD_SIZE": "8"}, 16, 32, 4),  # torchrun --numa-binding=node: four processes share each of two halves
    ({"LOCAL_WORLD_SIZE": "3"}, 2, 2, 1),
    ({"LOCAL_WORLD_SIZE": "1", "SLURM_CPUS_ON_NODE": "8"}, 6, 8, 6),
    ({"LOCAL_WORLD_SIZE": "4", "SLURM_CPUS_ON_NODE": "32"}, 8, 8, 8),  # a task with its own mask, as its wrapper script
    ({"LOCAL_WORLD_SIZE": "4", "SLURM_CPUS_ON_NODE": "32"}, 64, 64, 8),  # without one: the mask is the machine's
    # torchrun, one of two tasks on this node
    ({"LOCAL_WORLD_SIZE": "4", "SLURM_CPUS_ON_NODE": "32", "TORCHELASTIC_RUN_ID": "none"}, 16, 16, 4),
    ({}, 8, 1, 8),  # taskset gave it more than its shell has
])
def test_cores_come_from_slurm_or_from_the_launcher(environment, monkeypatch, variables, own, launcher, expected):
    environment(variables)
    masks = {0: set(range(own)), os.getppid(): set(range(launcher))}
    monkeypatch.setattr(os, "sched_getaffinity", masks.get, raising=False)
    assert launch.cores_per_process() == expected
