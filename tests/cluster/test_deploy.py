"""`tilewise deploy`: one sentence for what cannot be, before anything is started."""

from __future__ import annotations

import importlib.util
import socket
import sys
import warnings

import pytest

from tilewise import cli

HAS_RAY = importlib.util.find_spec("ray") is not None
needs_ray = pytest.mark.skipif(not HAS_RAY, reason="ray is not installed")


def complaint(capsys, *argv):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of Ray's imports
        assert cli.main(["deploy", *argv]) == 2
    return capsys.readouterr().err.strip()


def without(monkeypatch):
    """Let Ray be missing."""
    for name in [n for n in sys.modules if n.split(".")[0] == "ray" or "tilewise.cluster." in n]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "ray", None)


def test_without_ray_both_ways_say_what_to_install(capsys, monkeypatch):
    without(monkeypatch)
    want = "tilewise: deploy needs the package ray: pip install 'tilewise[ray]'"
    assert complaint(capsys) == want
    import tilewise.distributed

    with pytest.raises(ImportError, match=r"serve_app needs Ray: pip install 'tilewise\[ray\]'"):
        _ = tilewise.distributed.serve_app
    with pytest.raises(AttributeError, match="no attribute 'serve_apps'"):
        _ = tilewise.distributed.serve_apps


@needs_ray
@pytest.mark.ray
@pytest.mark.filterwarnings("ignore")
class TestWithRay:
    @pytest.fixture(autouse=True)
    def start_nothing(self, monkeypatch):
        import ray

        def refuse(*_, **__):
            raise AssertionError("a cluster was started")

        monkeypatch.setattr(ray, "init", refuse)

    def test_a_busy_port(self, capsys):
        with socket.socket() as taken:
            taken.bind(("127.0.0.1", 0))
            taken.listen()
            port = taken.getsockname()[1]
            said = complaint(capsys, "--port", str(port))
        assert f"must be an address that is free, got 127.0.0.1 and {port}" in said

    @pytest.mark.parametrize(
        ("argv", "message"),
        [
            (["--replicas", "0"], "replicas must be at least 1, got 0"),
            (["--replicas", "3", "--max-replicas", "2"],
             "max_replicas must be at least replicas 3, got 2"),
            (["--num-cpus", "-1"], "num_cpus must be finite and at least 0, got -1.0"),
            (["--ssl-certfile", "x"], "--ssl-certfile must not be given to deploy"),
            (["--port", "0"], "--port must be a number of its own for deploy, got 0"),
            (["--host", "0.0.0.0"], "--host must be of this machine alone unless"),
            (["--max-samples", "0"], "--max-samples must be at least 1, got 0"),
        ],
    )  # fmt: skip
    def test_wrong_options(self, capsys, argv, message):
        assert message in complaint(capsys, *argv)

    def test_gpus_that_the_cluster_has_not(self, monkeypatch):
        import ray

        from tilewise.cluster.command import _check_resources

        monkeypatch.setattr(ray, "cluster_resources", lambda: {"CPU": 8.0, "GPU": 3.0})
        settings = {"device": "cuda", "tensor_parallel_size": 2}
        _check_resources({"replicas": 1}, settings)
        with pytest.raises(ValueError, match="must fit the cluster's 3 GPUs at 2 each, got 2"):
            _check_resources({"replicas": 2}, settings)
        with pytest.raises(ValueError, match="must fit the cluster's 8 CPUs at 5 each, got 2"):
            _check_resources({"replicas": 2, "num_cpus": 5.0}, {**settings, "device": "cpu"})
