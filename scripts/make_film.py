"""Record the run that the page opens with: the unedited events of one run of the model in the package.

    python scripts/make_film.py [SETTING=VALUE ...] > src/adlm/serving/static/film.json

Settings are those of `lm.generate`, such as seed=3 block_length=4 top_p=0.9; SETTINGS has the defaults. A
film stores all of them: `adlm.load().generate(**film["settings"])` gives the same text.
"""

import asyncio
import json
import sys
from typing import Any

import yaml

SETTINGS = {
    "prompt": "The castle", "length": 128, "sampler": "confidence", "steps": 64, "block_length": 16, "top_p": 0.8,
    "seed": 2,
}  # fmt: skip


async def record(settings: dict[str, Any]) -> dict[str, Any]:
    """The events of /v1/frames for these settings."""
    from adlm.api import load
    from adlm.io.load import BOX_NAME
    from adlm.schema import SamplingConfig, ServeConfig
    from adlm.serving.bodies import FramesBody
    from adlm.serving.frames import film
    from adlm.serving.service import Service

    service = Service({BOX_NAME: load()}, ServeConfig(), SamplingConfig())
    served = service.model(None)
    served.worker.start()
    while not served.worker.ready:
        await asyncio.sleep(0.1)
    requests = served.requests(FramesBody(**settings), 1, True)
    found: dict[str, Any] = {"settings": settings, "frames": []}
    async for text in film(served, service.open({}, served, requests, guesses=True)):  # type: ignore[arg-type]
        name, data = (line.partition(": ")[2] for line in text.strip().split("\n"))
        if name == "frame":
            found["frames"].append(json.loads(data))
        else:
            found[name] = json.loads(data)
    service.stop_workers(5)
    # both differ from run to run and have nothing to do with the text
    del found["start"]["id"]
    found["end"]["seconds"] = 0
    return found


if __name__ == "__main__":
    typed = {name: yaml.safe_load(value) for name, value in (word.split("=", 1) for word in sys.argv[1:])}
    print(json.dumps(asyncio.run(record(SETTINGS | typed)), ensure_ascii=False, separators=(",", ":")))
