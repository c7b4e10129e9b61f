"""Pods of machines without a cluster: what their manifests forbid, what a copy takes over, what a status means."""

from __future__ import annotations

import contextlib
import io
import os
import signal
import subprocess
import tarfile
from pathlib import Path
from typing import Any

import pytest

from plaudit_sandbox import pod_manifests
from plaudit_sandbox.archives import FilesTooLargeError, copy_files
from plaudit_sandbox.machine import MachineLimits
from plaudit_sandbox.pod_commands import script_of
from plaudit_sandbox.pod_manifests import (
    FILES,
    PodSettings,
    agent_pod,
    ending_of,
    label_value,
    network_policy,
    placement,
    program_folders,
    renewal,
    start_problem,
    template_problem,
    witness_pod,
    witnesses,
    workdir_problem,
)
from plaudit_sandbox.pod_manifests import tests_pod as pod_of_tests
from plaudit_wire.errors import DataError, InfrastructureError

LIMITS = MachineLimits(memory_bytes=1 << 27, disk_bytes=1 << 26)
SETTINGS = PodSettings(
    "image:1",
    workdir="/repo",
    labels={"plaudit.dev/run": "mine"},
    template={
        "metadata": {"labels": {"queue": "q", "plaudit.dev/run": "other"}, "annotations": {"a": "b"}},
        "spec": {
            "runtimeClassName": "gvisor",
            "securityContext": {"fsGroup": 7},
            "volumes": [{"name": "mine", "emptyDir": {}}],
        },
    },
)
PODS = {
    "agent": agent_pod("one", SETTINGS, LIMITS),
    "tests": pod_of_tests("one-a", {"metadata": {"name": "one", "uid": "u"}}, SETTINGS, LIMITS, is_separate=False),
}


def test_a_pod_of_a_lost_node_is_given_up_early_unless_its_template_says_otherwise() -> None:
    assert {each["key"]: each["tolerationSeconds"] for each in PODS["tests"]["spec"]["tolerations"]} == {
        "node.kubernetes.io/not-ready": 30,
        "node.kubernetes.io/unreachable": 30,
    }
    own = {"key": "node.kubernetes.io/unreachable", "operator": "Exists", "tolerationSeconds": 900}
    for given, added in (([own], ["node.kubernetes.io/not-ready"]), ([{"operator": "Exists"}], [])):
        pod = agent_pod("one", PodSettings("image:1", template={"spec": {"tolerations": given}}), LIMITS)
        assert pod["spec"]["tolerations"][:1] == given
        assert [each["key"] for each in pod["spec"]["tolerations"][1:]] == added


def mounts(pod: dict[str, Any], name: str) -> dict[str, tuple[str, bool]]:
    containers = [*pod["spec"]["initContainers"], *pod["spec"]["containers"]]
    (found,) = (each["volumeMounts"] for each in containers if each["name"] == name)
    return {each["mountPath"]: (each["name"], each.get("readOnly", False)) for each in found}


@pytest.mark.parametrize("pod", PODS.values(), ids=PODS)
def test_every_container_is_confined_and_bounded(pod: dict[str, Any]) -> None:
    spec = pod["spec"]
    for each in [*spec["initContainers"], *spec["containers"]]:
        assert each["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }
        assert (
            {"cpu", "memory", "ephemeral-storage"}
            == set(each["resources"]["limits"])
            == set(each["resources"]["requests"])
        )
    assert spec["securityContext"]["runAsNonRoot"]
    assert spec["securityContext"]["fsGroup"] == 7
    assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert (spec["automountServiceAccountToken"], spec["shareProcessNamespace"]) == (False, False)
    assert (spec["restartPolicy"], spec["activeDeadlineSeconds"]) == ("Never", 86_400)
    assert spec["runtimeClassName"] == "gvisor"
    assert {"name": "files", "emptyDir": {"sizeLimit": str(1 << 26)}} in spec["volumes"]
    assert pod["metadata"]["labels"]["queue"] == "q"
    assert pod["metadata"]["labels"]["plaudit.dev/run"] == "mine"


def test_what_the_keeper_and_the_machine_may_write_to() -> None:
    agent, tests = (mounts(pod, "machine") for pod in PODS.values())
    assert {agent[place] for place in ("/app", "/opt", "/root", "/var", "/logs", "/repo")} == {("files", False)}
    assert agent["/plaudit/control"] == tests["/plaudit/control"] == ("control", True)
    assert (tests["/tests"], tests["/logs"], "/tests" in agent) == (("given", True), ("logs", False), False)
    assert mounts(PODS["agent"], "keeper")["/plaudit/files"] == ("files", True)
    assert mounts(PODS["tests"], "keeper")["/plaudit/logs"] == ("logs", True)
    assert mounts(PODS["tests"], "keeper")["/plaudit/control"] == ("control", False)


def test_pods_of_tests_go_with_the_agent_s_and_each_pod_has_a_user_of_its_own() -> None:
    (owner,) = PODS["tests"]["metadata"]["ownerReferences"]
    assert (owner["kind"], owner["name"], owner["uid"]) == ("Pod", "one", "u")
    assert PODS["tests"]["metadata"]["labels"]["plaudit.dev/machine"] == "one"
    users = {pod["spec"]["securityContext"]["runAsUser"] for pod in PODS.values()}
    assert len(users) == 2
    assert min(users) >= 1_000_000_000
    chosen = PodSettings("i", template={"spec": {"securityContext": {"runAsUser": 5}}})
    assert (chosen.has_own_user, SETTINGS.has_own_user) == (False, True)
    assert agent_pod("one", chosen, LIMITS)["spec"]["securityContext"]["runAsUser"] == 5


@pytest.mark.parametrize("name", ["hostNetwork", "containers", "shareProcessNamespace", "restartPolicy"])
def test_a_template_cannot_open_a_machine(name: str) -> None:
    assert f"spec.{name}" in template_problem({"spec": {name: True}})
    assert not template_problem(SETTINGS.template)


@pytest.mark.parametrize("workdir", ["/usr/bin", "/usr", "/etc/x", "/tests", "/plaudit/a", "/app/../usr"])
def test_a_workdir_of_programs_is_refused(workdir: str) -> None:
    assert workdir in workdir_problem(workdir)


def test_other_workdirs_become_writable() -> None:
    assert not any(map(workdir_problem, ("/app", "/repo", "/usr/src/app", "/")))
    assert PodSettings("i", workdir="/usr/src/app").places()[-1] == "usr/src/app"
    assert PodSettings("i", workdir="/root/x").places() == PodSettings("i").places()


def test_only_programs_in_writable_folders_are_put_back() -> None:
    path = "/opt/venv/bin:/usr/bin:/repo/bin:/root/.local/bin:/opt/bin:relative:/opt/../bin"
    assert program_folders(path, SETTINGS) == [
        *("/opt/venv/bin", "/opt/venv/lib", "/opt/venv/lib64", "/opt/venv/pyvenv.cfg"),
        *("/root/.local/bin", "/root/.local/lib", "/root/.local/lib64", "/root/.local/pyvenv.cfg"),
        "/opt/bin",
    ]


def test_the_image_s_programs_replace_the_agent_s_whatever_links_lead_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    image, files, evil = tmp_path / "image", tmp_path / "files", tmp_path / "evil"
    place = str(image).lstrip("/")
    (image / "v1/bin").mkdir(parents=True)
    (image / "v1/bin/tool").write_text("of the image")
    (image / "v").symlink_to("v1")
    (copy := files / place).mkdir(parents=True)
    (evil / "bin").mkdir(parents=True)
    (evil / "bin/tool").write_text("forged")
    (copy / "v").symlink_to(evil)
    (copy / "v1").symlink_to(evil)
    (copy / "new/bin").mkdir(parents=True)
    (copy / "work").write_text("stays")
    monkeypatch.setattr(pod_manifests, "FILES", str(files))
    settings = PodSettings("i", workdir=str(image))
    script = renewal([f"{image}/v/bin", f"{image}/new/bin", f"{evil}/bin"], settings)
    subprocess.run(["sh", "-ec", script], check=True)
    assert os.readlink(copy / "v") == "v1"
    assert not (copy / "v1").is_symlink()
    assert (copy / "v1/bin/tool").read_text() == "of the image"
    assert (evil / "bin/tool").read_text() == "forged"
    assert not (copy / "new/bin").exists()
    assert (copy / "work").read_text() == "stays"


def test_nobody_reaches_a_machine_and_it_reaches_nobody_unless_it_is_public() -> None:
    spec = network_policy("none")["spec"]
    assert (spec["ingress"], spec["egress"], spec["policyTypes"]) == ([], [], ["Ingress", "Egress"])
    public = network_policy("public")["spec"]
    assert public["ingress"] == []
    assert "169.254.0.0/16" in public["egress"][0]["to"][0]["ipBlock"]["except"]
    assert spec["podSelector"]["matchLabels"].items() <= PODS["agent"]["metadata"]["labels"].items()


def status(phase: str = "Running", reason: str = "", message: str = "", **machine: Any) -> dict[str, Any]:
    states = [{"name": "machine", "state": machine or {"running": {}}}, {"name": "keeper", "state": {"running": {}}}]
    found = {"phase": phase, "reason": reason, "message": message, "containerStatuses": states, "conditions": []}
    return {"metadata": {}, "status": found}


def ended(reason: str) -> dict[str, Any]:
    return status(terminated={"reason": reason, "exitCode": 137})


EXCEEDED = 'Usage of EmptyDir volume "files" exceeds the limit "64Mi". '
PRESSURE = "The node was low on resource: ephemeral-storage. Container machine was using 9Gi, request is 1Gi"
AWAY = status()
AWAY["status"]["conditions"] = [{"type": "Ready", "status": "False"}]


@pytest.mark.parametrize(
    ("pod", "ending"),
    [
        (status(), ""),
        (ended("OOMKilled"), "memory"),
        (ended("Error"), "exited"),
        (ended("ContainerStatusUnknown"), "machine: ContainerStatusUnknown"),
        (status("Failed", "Evicted", EXCEEDED), "disk"),
        (
            status(
                "Failed", "Evicted", "Pod ephemeral local storage usage exceeds the total limit of containers 1Gi. "
            ),
            "disk",
        ),
        (status("Failed", "Evicted", PRESSURE), f"Evicted: {PRESSURE}"),
        (status("Failed", "DeadlineExceeded"), "DeadlineExceeded"),
        (AWAY, "its node does not answer"),
        ({**status(), "metadata": {"deletionTimestamp": "now"}}, "it is being deleted"),
    ],
)
def test_only_what_a_policy_brings_about_is_its_own_ending(pod: dict[str, Any], ending: str) -> None:
    assert ending_of(pod) == ending


@pytest.mark.parametrize(("num_files", "code"), [(80, 28), (10, None)])
def test_a_keeper_ends_its_machine_where_it_holds_more_files_than_its_disk_has_pages(
    tmp_path: Path, num_files: int, code: int | None
) -> None:
    pod = agent_pod("one", SETTINGS, MachineLimits(disk_bytes=64 * 4096))
    script = pod["spec"]["containers"][1]["command"][2].replace("sleep 20", "sleep 0.1")
    for name in ("files", "control"):
        (tmp_path / name).mkdir()
        script = script.replace(f"/plaudit/{name}", str(tmp_path / name))
    for number in range(num_files):
        (tmp_path / "files" / str(number)).touch()
    with subprocess.Popen(["sh", "-c", script], start_new_session=True) as keeper:
        with contextlib.suppress(subprocess.TimeoutExpired):
            keeper.wait(None if code else 1.0)
        assert (keeper.returncode, (tmp_path / "control" / "end").exists()) == (code, code is not None)
        if code is None:
            os.killpg(keeper.pid, signal.SIGKILL)
    found = status()
    found["status"]["containerStatuses"][1]["state"] = {"terminated": {"reason": "Error", "exitCode": code}}
    assert (ending_of(found) == "disk") == (code is not None)


def on_node(name: str, node: str, found: dict[str, Any]) -> dict[str, Any]:
    return {"metadata": {**found["metadata"], "name": name}, "spec": {"nodeName": node}, "status": found["status"]}


def test_a_node_is_judged_by_other_machines_of_it_that_have_not_ended() -> None:
    silent = on_node("silent", "a", status())
    others = [
        on_node("beside", "a", status()),
        on_node("elsewhere", "b", status()),
        on_node("dead", "a", ended("Error")),
        on_node("away", "a", AWAY),
        on_node("new", "a", {"metadata": {}, "status": {"phase": "Pending"}}),
    ]
    assert witnesses([silent, *others], silent) == ["beside"]
    assert witnesses([silent, *others[1:]], silent) == []


def test_a_witness_has_the_rights_of_the_pod_that_is_silent_and_nothing_of_its_agent() -> None:
    silent = {**PODS["agent"], "spec": {**PODS["agent"]["spec"], "nodeName": "a"}}
    made = witness_pod("one-w", silent)
    (container,) = made["spec"]["containers"]
    assert (container["volumeMounts"], made["spec"]["volumes"], made["spec"]["initContainers"]) == ([], [], [])
    assert container["command"] == silent["spec"]["containers"][1]["command"]
    kept = ("nodeName", "runtimeClassName", "securityContext", "tolerations", "automountServiceAccountToken")
    assert {name: made["spec"][name] for name in kept} == {name: silent["spec"][name] for name in kept}
    labels = made["metadata"]["labels"]
    assert (labels["plaudit.dev/machine"], labels["plaudit.dev/machine-role"]) == ("one", "tests")
    assert (labels["plaudit.dev/run"], "queue" in labels) == ("mine", False)


def test_a_pod_that_cannot_start_says_why_in_kubernetes_s_words() -> None:
    words = "Back-off pulling image: not found"
    waiting = status("Pending", waiting={"reason": "ImagePullBackOff", "message": words})
    assert start_problem(waiting) == (f"ImagePullBackOff: {words}", True)
    pulls = status("Pending", waiting={"reason": "ErrImagePull", "message": "timeout"})
    assert start_problem(pulls) == ("ErrImagePull: timeout", False)
    full = status("Pending", waiting={"reason": "PodInitializing"})
    full["status"]["conditions"] = [{"type": "PodScheduled", "status": "False", "message": "0/2 nodes are available"}]
    assert start_problem(full) == ("0/2 nodes are available", False)


def archive(*members: tuple[str, bytes, int | str]) -> io.BytesIO:
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w", format=tarfile.GNU_FORMAT) as to:
        for name, kind, more in members:
            member = tarfile.TarInfo(name)
            member.type, member.mode, member.uid = kind, 0o4700, 5
            member.size, member.linkname = (more, "") if isinstance(more, int) else (0, more)
            to.addfile(member, io.BytesIO(b"x" * member.size))
    made.seek(0)
    return made


def copied(given: io.BytesIO, most_bytes: int = 1 << 20) -> list[tarfile.TarInfo]:
    to = io.BytesIO()
    copy_files(given, to, ["app", "usr/src/app"], most_bytes)
    to.seek(0)
    with tarfile.open(fileobj=to) as read:
        return read.getmembers()


def test_files_folders_and_links_alone_are_copied_and_nothing_from_elsewhere() -> None:
    found = copied(
        archive(
            ("app", tarfile.DIRTYPE, 0),
            ("app/a\udcff \n", tarfile.REGTYPE, 9),
            ("app/pipe", tarfile.FIFOTYPE, 0),
            ("app/device", tarfile.BLKTYPE, 0),
            ("app/link", tarfile.SYMTYPE, "/etc/passwd"),
            ("app/deceives", tarfile.SYMTYPE, "../tests/test.sh"),
            ("app/src", tarfile.DIRTYPE, 0),
            ("app/src/own", tarfile.SYMTYPE, "../tests/data"),
            ("app/hard", tarfile.LNKTYPE, "app/a\udcff \n"),
            ("app/other", tarfile.LNKTYPE, "logs/x"),
            ("app/of-pipe", tarfile.LNKTYPE, "app/pipe"),
            ("app/of-deceives", tarfile.LNKTYPE, "app/deceives"),
            ("app/of-link", tarfile.LNKTYPE, "app/link"),
            ("app/chain", tarfile.SYMTYPE, "chained"),
            ("app/chained", tarfile.SYMTYPE, "/tests/test.sh"),
            ("app/../etc/x", tarfile.REGTYPE, 1),
            ("/app/x", tarfile.REGTYPE, 1),
            ("etc/x", tarfile.REGTYPE, 1),
            ("usr/src/app/" + "n" * 300, tarfile.REGTYPE, 0),
        )
    )
    assert [each.name for each in found] == [
        "app",
        "app/a\udcff \n",
        "app/src",
        "app/hard",
        "usr/src/app/" + "n" * 300,
        "app/link",
        "app/src/own",
        "app/of-link",
    ]
    assert {(each.uid, each.mode) for each in found} == {(0, 0o700)}


@pytest.mark.parametrize(
    "members",
    [
        [("app/a", tarfile.REGTYPE, 2 << 20)],
        [(f"app/{number}", tarfile.REGTYPE, 0) for number in range(300)],
        [("app/" + "d/" * 2500, tarfile.REGTYPE, 0)],
    ],
    ids=["bytes", "entries", "path"],
)
def test_more_than_a_machine_may_hold_is_not_copied(members: list[tuple[str, bytes, int]]) -> None:
    with pytest.raises(FilesTooLargeError):
        copied(archive(*members))


def test_of_an_artifact_s_links_those_alone_are_copied_that_stay_in_it() -> None:
    links = {
        "inside": "deep/file",
        "deep/up": "../file",
        "deep/root": "..",
        "through": "deep/root/file",
        "absolute": "/app/out/file",
        "out": "../secret",
        "above": "..",
        "later": "deep/root/../../secret",
        "deep/far": "../../secret",
    }
    given = archive(("out", tarfile.DIRTYPE, 0), *((f"out/{name}", tarfile.SYMTYPE, to) for name, to in links.items()))
    to = io.BytesIO()
    assert copy_files(given, to, ["app/out"], 1 << 20, below="app", are_artifacts=True) == 10 * 4096
    to.seek(0)
    with tarfile.open(fileobj=to) as read:
        found = {each.name.removeprefix("app/out/") for each in read if each.issym()}
    assert found == {"inside", "deep/up", "deep/root", "through"}


@pytest.mark.parametrize("root", ["app", "elsewhere"])
def test_an_artifact_that_is_a_link_itself_is_not_copied(root: str) -> None:
    to = io.BytesIO()
    given = archive(("out", tarfile.SYMTYPE, root))
    copy_files(given, to, ["app/out"], 1 << 20, below="app", are_artifacts=True)
    to.seek(0)
    with tarfile.open(fileobj=to) as read:
        assert read.getnames() == []


def test_artifacts_take_the_place_of_what_a_pod_s_image_has_there(tmp_path: Path) -> None:
    files, logs = tmp_path / "files", tmp_path / "logs"
    for path in ("app/out/old", ".artifacts/app/out/new", ".artifacts/logs/artifacts/log", "app/stays"):
        (files / path).parent.mkdir(parents=True, exist_ok=True)
        (files / path).write_text(path)
    script = placement(["/logs/artifacts", "/app/out", "/app/out/new", "/srv/none", "/app/stays"])
    script = script.replace(FILES, str(files)).replace("/plaudit/logs", str(logs))
    subprocess.run(["sh", "-c", script], check=True)
    found = {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file()}
    assert found == {"files/app/out/new", "files/app/stays", "logs/artifacts/log"}


def test_a_cut_archive_is_an_error() -> None:
    whole = archive(("app/a", tarfile.REGTYPE, 90_000)).getvalue()
    with pytest.raises(InfrastructureError, match="cannot be read"):
        copied(io.BytesIO(whole[:40_000]))


def test_a_command_and_its_variables_survive_the_shell(tmp_path: Path) -> None:
    word = "a 'b' \"c\" $d `e`\n\\ é"
    script = script_of(["printf", "%s|%s", word, "-n"], {"A": word}, str(tmp_path), processes=64)
    assert subprocess.run(["sh", "-c", script], capture_output=True, check=True).stdout.decode() == f"{word}|-n"
    script = script_of(["sh", "-c", 'printf %s "$A"; pwd; ulimit -t >&2'], {"A": word}, "/nowhere")
    shown = subprocess.run(["sh", "-c", script], capture_output=True, check=True).stdout.decode()
    assert shown.startswith(f"{word}/\n")
    for command, variables in ((["a\0b"], {}), (["x" * (1 << 17)], {}), (["true"], {"a.b": "c"})):
        with pytest.raises(DataError):
            script_of(command, variables, "/app")


def test_label_values_are_ones_that_kubernetes_takes() -> None:
    assert label_value("run-1.a_B") == "run-1.a_B"
    assert len({label_value("of many"), label_value("x" * 64), label_value("-a")}) == 3
    assert all(len(label_value(text)) == 32 for text in ("of many", "x" * 64, "-a", ""))
