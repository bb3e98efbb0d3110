"""A release: one version, a change log in its form, archives that build alike, what is deployed."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
from pathlib import Path

import pytest
import yaml
from hatchling.builders.sdist import SdistBuilder
from hatchling.metadata.core import ProjectMetadata
from hatchling.plugin.manager import PluginManager

import tilewise
from tilewise.cli import _parser
from tilewise.server.options import unknown_variables

ROOT = Path(__file__).resolve().parent.parent
FORMS = sorted((ROOT / ".github/ISSUE_TEMPLATE").glob("*.yml"))
MANIFESTS = sorted((ROOT / "deploy/kubernetes").glob("*.yaml"))
DOCKERFILES = sorted((ROOT / "deploy").glob("Dockerfile.*"))
KINDS = ("Added", "Changed", "Deprecated", "Removed", "Fixed", "Security")
MOST_LETTERS = 200  # of a line of the change log


def test_the_version_is_semantic_and_read_from_one_place():
    assert re.fullmatch(r"\d+\.\d+\.\d+(rc\d+)?", tilewise.__version__)
    metadata = ProjectMetadata(str(ROOT), PluginManager())
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert "version" not in project
    assert "version" in project["dynamic"]
    assert metadata.version == tilewise.__version__


def test_the_citation_names_this_version_and_its_date():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["cff-version"] == "1.2.0"
    assert citation["version"] == tilewise.__version__
    heading = f"## [{citation['version']}] - {citation['date-released']}"
    assert heading in (ROOT / "CHANGELOG.md").read_text().splitlines()


def changes() -> list[str]:
    """The lines of the change log from its first release on."""
    lines = (ROOT / "CHANGELOG.md").read_text().splitlines()
    return lines[lines.index("## [Unreleased]") :]


def test_the_change_log_keeps_its_form():
    headings = [line for line in changes() if line.startswith("#")]
    releases = [line for line in headings if line.startswith("## ")]
    assert releases[0] == "## [Unreleased]"
    dated = [re.fullmatch(r"## \[(\d+\.\d+\.\d+)\] - (\d{4}-\d\d-\d\d)", x) for x in releases[1:]]
    assert all(dated)
    versions = [tuple(map(int, found[1].split("."))) for found in dated]
    assert versions == sorted(set(versions), reverse=True)
    kinds = [line for line in headings if not line.startswith("## ")]
    assert set(kinds) <= {f"### {kind}" for kind in KINDS}


def test_a_change_is_one_line():
    entries = [line for line in changes() if line.startswith("- ")]
    assert len(entries) > 20
    assert [line for line in entries if len(line) > MOST_LETTERS] == []
    assert [line for line in changes() if line.startswith(" ")] == []
    assert [line for line in entries if not re.search(r"[.)]$", line)] == []


def test_the_sdist_holds_what_its_own_tests_read():
    held = {file.relative_path for file in SdistBuilder(str(ROOT)).recurse_included_files()}
    tracked = subprocess.run(
        ["git", "ls-files"], capture_output=True, text=True, cwd=ROOT, check=False
    )
    if tracked.returncode:
        pytest.skip("not a clone")
    missing = (
        set(tracked.stdout.split("\n")) - held - {"", ".gitignore", "pyproject.toml"}
    )  # which is always there
    assert missing == set()
    assert not [name for name in held if "__pycache__" in name or name.endswith((".nbi", ".nbc"))]


def _build(source: Path, out: Path, target: str) -> Path:
    env = {k: v for k, v in os.environ.items() if k not in ("SOURCE_DATE_EPOCH", "PYTHONPATH")}
    command = [sys.executable, "-m", "hatchling", "build", "-t", target, "-d", str(out)]
    done = subprocess.run(command, cwd=source, capture_output=True, text=True, env=env, check=False)
    assert done.returncode == 0, done.stderr
    [built] = out.iterdir()
    return built


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_archives_are_the_same_bytes_whenever_and_wherever_they_are_built(tmp_path):
    """The sdist of another folder, and the wheel of the unpacked sdist."""
    sdist = _build(ROOT, tmp_path / "sdist", "sdist")
    with tarfile.open(sdist) as archive:
        archive.extractall(tmp_path / "unpacked", filter="data")
    [unpacked] = (tmp_path / "unpacked").iterdir()
    for path in unpacked.rglob("*"):
        os.utime(path, (1e9, 1e9))
    caches = unpacked / "tilewise" / "kernels" / "__pycache__"
    caches.mkdir()
    (caches / "left.cpython-311.pyc").write_bytes(b"a cache")
    wheel = _build(ROOT, tmp_path / "wheel", "wheel")
    again = _build(unpacked, tmp_path / "wheel_again", "wheel")
    assert wheel.name == f"tilewise-{tilewise.__version__}-py3-none-any.whl"
    assert again.name == wheel.name
    assert again.read_bytes() == wheel.read_bytes()
    shutil.rmtree(caches)
    assert _build(unpacked, tmp_path / "sdist_again", "sdist").read_bytes() == sdist.read_bytes()
    # And it tests itself, of which this file and the public names stand for all.
    env = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    tests = ["tests/test_release.py", "tests/test_public_api.py"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *tests],
        cwd=unpacked,
        capture_output=True,
        text=True,
        env=env | {"PYTHONPATH": str(unpacked)},
        check=False,
    )
    assert done.returncode == 0, done.stdout[-2000:]


@pytest.mark.parametrize("form", FORMS, ids=[form.stem for form in FORMS])
def test_an_issue_form_is_one(form):
    """The rules of GitHub's forms: keys, types, labels, unique ids, something to fill in."""
    told = yaml.safe_load(form.read_text())
    if form.stem == "config":
        assert set(told) == {"blank_issues_enabled", "contact_links"}
        return
    assert set(told) <= {"name", "description", "title", "labels", "body"}
    assert told["name"]
    assert told["description"]
    asked = [part for part in told["body"] if part["type"] != "markdown"]
    assert asked
    assert len({part["id"] for part in asked}) == len(asked)
    for part in told["body"]:
        assert set(part) <= {"type", "id", "attributes", "validations"}
        assert part["type"] in ("markdown", "textarea", "input", "dropdown", "checkboxes")
        needed = {"markdown": "value", "dropdown": "options"}.get(part["type"], "label")
        assert part["attributes"][needed]
        for option in part["attributes"].get("options", ()):
            assert isinstance(option, str)


def _instructions(dockerfile: Path) -> list[list[str]]:
    text = re.sub(r"^#.*\n", "", dockerfile.read_text(), flags=re.MULTILINE)
    lines = re.sub(r"\\\n", " ", text).splitlines()
    return [line.split(None, 1) for line in lines if line.strip()]


@pytest.mark.parametrize("dockerfile", DOCKERFILES, ids=[d.name for d in DOCKERFILES])
def test_an_image_is_pinned_without_root_and_copies_what_there_is(dockerfile):
    instructions = _instructions(dockerfile)
    bases = [rest.split()[0] for name, rest in instructions if name == "FROM"]
    assert bases
    assert all(re.search(r":\d+\.\d+", base) for base in bases)
    names = [name for name, _ in instructions]
    assert "ADD" not in names
    users = [rest for name, rest in instructions if name == "USER"]
    assert users == ["1000"]
    assert names.index("USER") > max(i for i, name in enumerate(names) if name == "RUN")
    ignored = (ROOT / ".dockerignore").read_text().splitlines()
    for name, rest in instructions:
        if name == "COPY" and not rest.startswith("--from"):
            for source in rest.split()[:-1]:
                assert (ROOT / source).exists()
                assert f"!{source}" in ignored  # or the build does not see it
    [entry] = [rest for name, rest in instructions if name == "ENTRYPOINT"]
    assert entry == '["tilewise"]'
    assert any(name == "HEALTHCHECK" and "/ready" in rest for name, rest in instructions)


def _documents() -> list[dict]:
    return [yaml.safe_load(path.read_text()) for path in MANIFESTS]


def test_variables_of_what_is_deployed_are_options_of_the_server(monkeypatch):
    files = [*DOCKERFILES, *MANIFESTS, ROOT / "deploy/compose.yaml"]
    text = "\n".join(path.read_text() for path in files)
    named = set(re.findall(r"\bTILEWISE_[A-Z_]+", text)) - {"TILEWISE_PUBLISHED"}
    assert {"TILEWISE_API_KEY", "TILEWISE_MODEL", "TILEWISE_HOST"} <= named
    for name in named:
        monkeypatch.setenv(name, "1")
    assert unknown_variables() is None


def test_the_manifests_fit_one_another_and_the_server():
    by_kind = {document["kind"]: document for document in _documents()}
    listed = by_kind["Kustomization"]["resources"]
    assert {*listed, "kustomization.yaml"} == {path.name for path in MANIFESTS}
    pod = by_kind["Deployment"]["spec"]["template"]
    labels = pod["metadata"]["labels"]
    assert by_kind["Deployment"]["spec"]["selector"]["matchLabels"] == labels
    assert by_kind["Service"]["spec"]["selector"] == labels
    assert by_kind["NetworkPolicy"]["spec"]["podSelector"]["matchLabels"] == labels
    [container] = pod["spec"]["containers"]
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    assert by_kind["Service"]["spec"]["ports"][0]["targetPort"] in ports
    assert by_kind["NetworkPolicy"]["spec"]["ingress"][0]["ports"][0]["port"] in ports.values()
    claims = [v.get("persistentVolumeClaim", {}) for v in pod["spec"]["volumes"]]
    claimed = [claim["claimName"] for claim in claims if claim]
    assert claimed == [by_kind["PersistentVolumeClaim"]["metadata"]["name"]]
    mounted = {mount["name"] for mount in container["volumeMounts"]}
    assert mounted == {volume["name"] for volume in pod["spec"]["volumes"]}
    probes = {container[f"{when}Probe"]["httpGet"]["path"] for when in ("startup", "readiness")}
    assert probes == {"/ready"}
    assert container["livenessProbe"]["httpGet"]["path"] == "/health"
    # The command line takes the arguments, and the pod waits longer than the server does.
    options, unknown = _parser().parse_known_args(container["args"])
    assert unknown == []
    assert options.shutdown_timeout < pod["spec"]["terminationGracePeriodSeconds"]


def test_a_pod_and_a_container_have_no_privileges():
    [pod] = [d["spec"]["template"]["spec"] for d in _documents() if d["kind"] == "Deployment"]
    assert pod["securityContext"]["runAsNonRoot"]
    assert not pod["automountServiceAccountToken"]
    for container in pod["containers"]:
        rights = container["securityContext"]
        assert not rights["allowPrivilegeEscalation"]
        assert rights["readOnlyRootFilesystem"]
        assert rights["capabilities"]["drop"] == ["ALL"]
    compose = yaml.safe_load((ROOT / "deploy/compose.yaml").read_text())
    for service in compose["services"].values():
        assert service["cap_drop"] == ["ALL"]
        assert (ROOT / "deploy" / service["build"]["context"]).resolve() == ROOT
        assert (ROOT / service["build"]["dockerfile"]) in DOCKERFILES


@pytest.mark.slow
@pytest.mark.parametrize("manifest", MANIFESTS, ids=[path.stem for path in MANIFESTS])
def test_a_manifest_follows_the_schema_of_kubernetes(manifest):
    validate = pytest.importorskip("kubernetes_validate").validate
    document = yaml.safe_load(manifest.read_text())
    if document["kind"] != "Kustomization":  # which no server of Kubernetes is sent
        validate(document, "1.34", strict=True)
