"""Pictures of docs/healthy.md: the page of `covey watch` with recorded runs.

PYTHONPATH=tests python -m helpers.diagnosis_pictures
"""

import base64
import json
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

from covey.config import RunConfig
from covey.config.model_sources import CONFIG_FILE
from covey.config.recipe import config_from_dict, write_config
from covey.tracking.run_folder import METRICS_FILE, SUMMARY_FILE
from helpers.browser import browser
from helpers.diagnosis_records import HEALTHY_FILE, SICK_FILE, RecordedRun, read_recorded
from helpers.watched import serving

IMAGES = Path(__file__).parents[2] / "docs" / "images"
PICTURES = {  # the last part of a file's name -> the run
    "healthy": "tiny first digit, grpo",
    "hacking": "reward hacking",
    "collapse": "entropy collapse",
    "truncation": "truncation",
    "critic": "critic that explains nothing",
}
WIDTH, HEIGHT = 1280, 1150
READY = "document.querySelectorAll('canvas').length > 3"


def write_run(folder: Path, run: RecordedRun) -> None:
    """A run folder with what is recorded of a run."""
    folder.mkdir(parents=True)
    config = replace(config_from_dict(dict(run.config)), run_dir=str(folder))
    write_config(replace(config, model="tiny") if isinstance(config, RunConfig) else config, folder / CONFIG_FILE)
    (folder / METRICS_FILE).write_text("".join(json.dumps(line) + "\n" for line in run.metrics))
    last = run.metrics[-1]["step"]
    summary = {"recipe": run.name, "steps": last, "seed": config.seed, "evaluations": run.evaluations}
    (folder / SUMMARY_FILE).write_text(json.dumps(summary))


if __name__ == "__main__":
    runs = {run.name: run for run in [*read_recorded(HEALTHY_FILE), *read_recorded(SICK_FILE)]}
    with TemporaryDirectory() as scratch, browser(Path(scratch) / "profile") as chromium:
        for picture, name in PICTURES.items():
            place = Path(scratch) / picture
            write_run(place / "runs" / name.replace(" ", "_").replace(",", ""), runs[name])
            with serving(place) as address:
                page = chromium.open(address, width=WIDTH, height=HEIGHT)
                page.wait(READY)
                image = page.send("Page.captureScreenshot")["data"]
                page.close()
            (IMAGES / f"healthy_{picture}.png").write_bytes(base64.b64decode(image))
