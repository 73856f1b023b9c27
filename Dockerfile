# docker build --tag dpbench .
# docker run --rm --volume "$PWD:/work" --user "$(id -u):$(id -g)" dpbench train experiment=demo
# Data sets are looked for in /data (--volume /folder/with/data:/data); a GPU is found with --gpus all.
ARG PYTHON=3.13
FROM python:${PYTHON}-slim

# A compiler for the kernels, which are built on first use; without it everything works, more slowly.
RUN apt-get update \
    && apt-get install --yes --no-install-recommends g++ git \
    && rm -rf /var/lib/apt/lists/*

COPY pyproject.toml constraints.txt README.md LICENSE CHANGELOG.md CITATION.cff /opt/dpbench/
COPY conf /opt/dpbench/conf
COPY src /opt/dpbench/src
RUN pip install --no-cache-dir --constraint /opt/dpbench/constraints.txt /opt/dpbench

# Any user may run it: caches lie where everybody can write.
ENV HOME=/tmp DPBENCH_DATA=/data
WORKDIR /work
ENTRYPOINT ["dpbench"]
CMD ["--help"]
