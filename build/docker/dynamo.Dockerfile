# An engine as a worker of NVIDIA Dynamo, and Dynamo's front end: docker build -f build/docker/dynamo.Dockerfile -t llmserve-dynamo .
ARG PYTHON_IMAGE=python:3.11-slim-bookworm

FROM ${PYTHON_IMAGE} AS build
RUN apt-get update && apt-get install --no-install-recommends -y g++ && rm -rf /var/lib/apt/lists/*
WORKDIR /source
COPY CMakeLists.txt pyproject.toml README.md LICENSE ./
COPY llmserve llmserve
COPY pipelines pipelines
COPY pipelines-embeddings pipelines-embeddings
RUN pip wheel --no-cache-dir --no-deps --wheel-dir /wheels .

FROM ${PYTHON_IMAGE}
COPY tools/cluster/requirements.txt /tmp/requirements.txt
RUN pip install --no-cache-dir --no-deps -r /tmp/requirements.txt && rm /tmp/requirements.txt
RUN --mount=type=bind,from=build,source=/wheels,target=/wheels pip install --no-cache-dir --no-deps --no-index --find-links /wheels llmserve
RUN useradd --create-home --uid 1000 llmserve
USER 1000
WORKDIR /home/llmserve
STOPSIGNAL SIGTERM
ENTRYPOINT ["llmserve"]
CMD ["worker", "/engine"]
