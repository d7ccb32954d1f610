# llmserve for NVIDIA GPUs: docker build -f build/docker/cuda.Dockerfile -t llmserve-cuda .
# No CUDA inside: the compiler comes with the extra, the driver from the machine that runs it (--gpus).
ARG PYTHON_IMAGE=python:3.11-slim-bookworm

FROM ${PYTHON_IMAGE} AS build
RUN apt-get update && apt-get install --no-install-recommends -y g++ && rm -rf /var/lib/apt/lists/*
WORKDIR /source
COPY CMakeLists.txt pyproject.toml README.md LICENSE ./
COPY llmserve llmserve
COPY pipelines pipelines
COPY pipelines-embeddings pipelines-embeddings
RUN pip wheel --no-cache-dir --wheel-dir /wheels '.[cuda,nvidia]'

FROM ${PYTHON_IMAGE}
RUN --mount=type=bind,from=build,source=/wheels,target=/wheels \
    pip install --no-cache-dir --no-index --find-links /wheels 'llmserve[cuda,nvidia]'
ENV NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility
RUN useradd --create-home llmserve
USER llmserve
WORKDIR /home/llmserve
EXPOSE 8000 8001 8002
HEALTHCHECK --start-period=300s CMD ["python", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:8000/v2/health/ready', timeout=5)"]
STOPSIGNAL SIGTERM
ENTRYPOINT ["llmserve"]
CMD ["serve", "/engine"]
