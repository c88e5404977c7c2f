"""HTTP on the engine: many requests, any mixture of samplers and steps, one network call at a time.

command.py   `adlm serve`
server.py    uvicorn with a drain on SIGTERM and a limit on slow clients
app.py       the routes
guard.py     what every request passes: key, size, time to send, disconnects, metrics
models.py    what is served: a checkpoint, its worker, its defaults; bodies become engine requests here
worker.py    the thread that owns an engine
frames.py    canvases as server-sent events
openai.py    the shape of OpenAI's completions
guesses.py   what the anchor network believes about holes
schemas.py   bodies of requests and answers
problems.py  errors as answers
metrics.py   counters in Prometheus' text format
static/      the page
"""
