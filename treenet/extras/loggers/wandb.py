"""Weights & Biases: offline files in RUN/wandb, unless WANDB_MODE says another mode."""

import os
import shutil
import time
from pathlib import Path

from treenet.loggers.content import RunContent, RunIdentity, numbers_of
from treeproc.common.errors import UserError
from treeproc.common.files import cache_folder

MODE, PROJECT = "WANDB_MODE", "WANDB_PROJECT"
OFFLINE = "offline"


class Logger:
    """Sends what the W&B run lacks.

    The server knows what it has. A session offline does not, so its file has the whole run, and files of earlier sessions are
    removed. W&B gets the content of the run folder alone: no console, no code, no names of hosts or users.
    """

    package = "wandb"
    remote_place = f"{MODE}=online"

    @staticmethod
    def has_place(local: bool) -> bool:
        """Return whether W&B can store a run. A run in an object store has no place for offline files."""
        return local or os.environ.get(MODE, OFFLINE) != OFFLINE

    def __init__(self, identity: RunIdentity, trains: bool):
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")  # no network unless the user asks for it
        import wandb  # noqa: F401, the package is loaded before threads work beside each other

        self._identity, self._mode = identity, os.environ.get(MODE) or OFFLINE
        self._sent: dict[str, int] = {}
        self._config: dict[str, str] = {}
        self._scores: dict[str, float] = {}
        self._is_alone = False
        self.place = ""

    def open(self) -> None:
        """Begin a session of the run with this identity. Raises UserError if W&B would ask for a key."""
        import wandb

        if self._identity.folder is None and self._mode == OFFLINE:
            raise UserError(f"a run in an object store needs {MODE}=online")
        if self._mode not in (OFFLINE, "disabled") and not wandb.login(prompt=False):
            raise UserError("W&B knows no API key; run `wandb login`, or set WANDB_API_KEY")
        self._wait_for_a_free_name()
        self._run = wandb.init(
            project=os.environ.get(PROJECT) or "tree-attention",
            id=self._identity.id,
            name=self._identity.name,
            dir=self._identity.folder or cache_folder(),
            mode=self._mode,
            resume=None if self._mode == OFFLINE else "allow",
            reinit="create_new",
            settings=wandb.Settings(
                host="",
                console="off",
                silent=True,
                disable_git=True,
                save_code=False,
                x_disable_meta=True,
                x_disable_machine_info=True,
                x_disable_stats=True,
                x_save_requirements=False,
            ),
        )
        for event in ("train", "valid"):
            self._run.define_metric(f"{event}/*", step_metric=f"{event}/update")
            self._sent[event] = int(self._run.summary.get(f"{event}/update") or 0)
        if self._mode == OFFLINE:
            folder = self._folder()
            self.place = f"{folder}, which `wandb sync {folder}` uploads"
        else:
            self.place = self._run.url or f"no run, because {MODE} is {self._mode}"

    def send(self, content: RunContent) -> None:
        """Send the settings, notes, lines and scores that W&B lacks."""
        config = {**content.params, **content.notes}
        if config != self._config:
            self._run.config.update(config, allow_val_change=True)
            self._config = config
        for line in content.lines:
            event, step = line["event"], line["step"]
            if step > self._sent.get(event, 0):
                self._run.log(numbers_of(line))
                self._sent[event] = step
        scores = {score.name: score.value for score in content.scores}
        if scores != self._scores:
            self._run.summary.update(scores)
            self._scores = scores
        if self._mode == OFFLINE and not self._is_alone:
            self._remove_earlier()
            self._is_alone = True

    def close(self, state: str | None) -> None:
        """End the session."""
        self._run.finish(exit_code=0 if state in (None, "finished") else 1)

    def _wait_for_a_free_name(self) -> None:
        """Wait while this second has a folder. W&B would give the new one a name that it does not tell."""
        while self._identity.folder and list(self._identity.folder.glob(f"wandb/offline-run-{time.strftime('%Y%m%d_%H%M%S')}-*")):
            time.sleep(0.1)

    def _remove_earlier(self) -> None:
        """Remove the files of earlier sessions. This one's file has all that they have."""
        for earlier in self._folder().parent.glob(f"offline-run-*-{self._identity.id}"):
            if earlier != self._folder() and not earlier.is_symlink():
                shutil.rmtree(earlier, ignore_errors=True)

    def _folder(self) -> Path:
        return Path(self._run.settings.sync_dir)
