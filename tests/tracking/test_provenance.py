import os
import subprocess

import pytest

from dtrain.tracking.provenance import git_state, provenance


def git(folder, *arguments):
    identity = ("-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false")
    done = subprocess.run(["git", "-C", str(folder), *identity, *arguments], check=True, capture_output=True, text=True)
    return done.stdout.strip()


@pytest.fixture
def project(tmp_path):
    git(tmp_path, "init", "--quiet")
    (tmp_path / "model.py").write_text("width = 4\n")
    return tmp_path


def test_the_commit_is_that_of_the_users_code_and_dirty_if_tracked_files_differ(project):
    assert git_state(project) == {}  # no commit yet
    git(project, "add", "model.py")
    git(project, "commit", "--quiet", "--message=one")
    commit = git(project, "rev-parse", "HEAD")
    (project / "runs").mkdir()
    (project / "runs" / "untracked").touch()
    assert git_state(project / "runs") == {"commit": commit, "dirty": False}
    (project / "model.py").write_text("width = 8\n")
    assert git_state(project) == {"commit": commit, "dirty": True}
    assert provenance(project)["commit"] == commit


def test_a_file_whose_name_is_no_utf_8_is_no_obstacle(project):
    git(project, "config", "core.quotePath", "false")
    name = project / os.fsdecode(b"caf\xe9.py")
    name.touch()
    git(project, "add", "--all")
    git(project, "commit", "--quiet", "--message=one")
    name.write_text("changed\n")
    assert git_state(project)["dirty"] is True


def test_without_git_or_a_repository_the_versions_are_still_there(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert git_state(tmp_path) == {}
    found = provenance(tmp_path)
    assert {"dtrain", "torch", "python", "platform", "device"} <= set(found)
    assert "commit" not in found
