# llmserve with the CPU engine: docker build -f build/docker/cpu.Dockerfile -t llmserve .
ARG PYTHON_IMAGE=python:3.11-slim-bookworm

FROM ${PYTHON_IMAGE} AS build
RUN apt-get update && apt-get install --no-install-recommends -y g++ && rm -rf /var/lib/apt/lists/*
WORKDIR /source
COPY CMakeLists.txt pyproject.toml README.md LICENSE ./
COPY llmserve llmserve
COPY pipelines pipelines
COPY pipelines-embeddings pipelines-embeddings
RUN pip wheel --no-cache-dir --wheel-dir /wheels .

FROM ${PYTHON_IMAGE}
RUN --mount=type=bind,from=build,source=/wheels,target=/wheels pip install --no-cache-dir --no-index --find-links /wheels llmserve
RUN useradd --create-home llmserve
USER llmserve
WORKDIR /home/llmserve
EXPOSE 8000 8001 8002
HEALTHCHECK --start-period=120s CMD ["python", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:8000/v2/health/ready', timeout=5)"]
STOPSIGNAL SIGTERM
ENTRYPOINT ["llmserve"]
CMD ["serve", "/engine"]
