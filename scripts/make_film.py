"""The recorded run that the page opens with: the events of one run of the model in the package, unedited.

    python scripts/make_film.py [SEED] > src/adlm/serving/static/film.json

Same seed, same text: `adlm.load().generate(**SETTINGS)` gives it too.
"""

import asyncio
import json
import sys
from typing import Any

SETTINGS: dict[str, Any] = {"prompt": "The river", "length": 128, "sampler": "mdlm", "steps": 64, "top_p": 0.9}
SEED = 2


async def record(seed: int) -> dict[str, Any]:
    """The events of /v1/frames for the settings above."""
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
    requests = served.requests(FramesBody(**SETTINGS, seed=seed), 1, True)
    found: dict[str, Any] = {"frames": []}
    async for text in film(served, service.open({}, served, requests, guesses=True)):  # type: ignore[arg-type]
        name, data = (line.partition(": ")[2] for line in text.strip().split("\n"))
        if name == "frame":
            found["frames"].append(json.loads(data))
        else:
            found[name] = json.loads(data)
    service.stop_workers(5)
    # neither says anything about the text, and both differ from run to run
    del found["start"]["id"]
    found["end"]["seconds"] = 0
    return found


if __name__ == "__main__":
    seed = int(sys.argv[1]) if len(sys.argv) > 1 else SEED
    print(json.dumps(asyncio.run(record(seed)), ensure_ascii=False, separators=(",", ":")))
