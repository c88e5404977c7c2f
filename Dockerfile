# The server in a container, for CPUs (the default, small) or NVIDIA GPUs:
#
#   docker build -t adlm .
#   docker build -t adlm:gpu --build-arg VARIANT=gpu .
#   docker run -p 8000:8000 -e ADLM_API_KEY=... -v ./runs/demo:/srv/runs/demo:ro adlm
#   docker run --gpus all -p 8000:8000 -e ADLM_API_KEY=... -v ./my-model:/srv/model:ro adlm:gpu model
#
# What is given after the image's name goes to `adlm serve`: checkpoints, port=..., sampling.batch_size=..., sampling.steps=...
FROM python:3.11-slim

# cpu: torch without CUDA; gpu: the ordinary wheels, which bring CUDA's libraries along (a driver is all the host needs).
# The lock file has hashes of the ordinary wheels, and of one CPU build of torch only: the CPU variant checks versions alone.
ARG VARIANT=cpu

# The GPU variant compiles kernels when it starts.
RUN if [ "$VARIANT" = gpu ]; then \
        apt-get update && apt-get install -y --no-install-recommends g++ && rm -rf /var/lib/apt/lists/*; \
    fi \
    && pip install --no-cache-dir uv

WORKDIR /srv
COPY pyproject.toml setup.py requirements.lock README.md LICENSE ./
COPY src ./src
RUN case "$VARIANT" in \
        cpu) backend="--torch-backend cpu --no-verify-hashes" ;; \
        gpu) backend="" ;; \
        *) echo "VARIANT must be cpu or gpu, got $VARIANT" >&2; exit 1 ;; \
    esac \
    && uv pip install --system --no-cache $backend -c requirements.lock '.[serve,constrain]' \
    && useradd --create-home adlm
USER adlm

# Inside the container every interface is the container's own; -p decides who reaches it.
ENV PYTHONUNBUFFERED=1
EXPOSE 8000
HEALTHCHECK --interval=10s --timeout=3s --start-period=120s \
    CMD python -c "import urllib.request as u; u.urlopen('http://127.0.0.1:8000/readyz')"
# exec form: SIGTERM reaches the server, which finishes what runs
ENTRYPOINT ["adlm", "serve", "host=0.0.0.0"]
