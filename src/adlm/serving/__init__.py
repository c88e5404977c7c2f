"""HTTP on the engine: many requests, any mixture of samplers and steps, one network call at a time.

command.py  `adlm serve`
server.py   uvicorn with a drain on SIGTERM; the guard of every request: key, size, slow and lost clients
app.py      the routes, and errors as answers
bodies.py   bodies of requests (sampling settings generated from the schema) and of answers
service.py  what is served: a checkpoint, its defaults and limits; bodies become requests of the engine
worker.py   the thread that owns an engine
frames.py   canvases as server-sent events
openai.py   OpenAI's completions
metrics.py  counters in Prometheus' text format
static/     the page
"""
