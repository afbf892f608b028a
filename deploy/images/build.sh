#!/usr/bin/env bash
# Build images with buildah and leave each as an OCI archive below build/images, with its digest and a list
# of its Python packages (CycloneDX).
#   deploy/images/build.sh operator [sidecar] [sglang]
# SGLANG=REGISTRY/sglang@sha256:... names the image that `sglang` adds Windrow to.
# BASE=IMAGE names the base; BASE=debian makes one from packages, where no registry is at hand.
# ARGS=... are handed to buildah, like --build-arg TORCH=cu130.
set -euo pipefail
cd "$(dirname "$0")/../.."
need() {
  command -v "$1" >/dev/null && return
  if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
    apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq "$1" >/dev/null && return
  fi
  echo "building images needs $1 (Debian: apt-get install $1)"
  exit 2
}
need buildah
version=$(sed -n 's/^version = "\(.*\)"/\1/p' pyproject.toml)
out=build/images
mkdir -p "$out"
# Works in a container without privileges over its storage, too.
export BUILDAH_ISOLATION=${BUILDAH_ISOLATION:-chroot} STORAGE_DRIVER=${STORAGE_DRIVER:-vfs}
flags=(--network host --ignorefile deploy/images/ignore)
# A network with an authority of its own: its certificates are known while building, not in the image.
if [ -n "${SSL_CERT_FILE:-}" ]; then
  flags+=(-v /etc/ssl/certs:/etc/ssl/certs:ro --build-arg "SSL_CERT_FILE=$SSL_CERT_FILE")
fi
if [ "${BASE:-}" = debian ]; then
  need mmdebstrap
  if [ ! -e "$out/base.tar" ]; then
    mmdebstrap --quiet --variant=minbase --include=ca-certificates,python3,python3-venv,libgomp1 bookworm "$out/part.tar"
    mv "$out/part.tar" "$out/base.tar"
  fi
  made=$(buildah from scratch)
  buildah add -q "$made" "$out/base.tar" / >/dev/null
  buildah config --env PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin "$made"
  BASE=localhost/windrow-base:bookworm
  buildah commit -q --rm "$made" "$BASE" >/dev/null
fi
[ -n "${BASE:-}" ] && flags+=(--build-arg "BASE=$BASE")
for name in "${@:-operator}"; do
  if [ "$name" = sglang ]; then
    case "${SGLANG:-}" in
      *@sha256:*) flags+=(--build-arg "SGLANG=$SGLANG") ;;
      *)
        echo "SGLANG='${SGLANG:-}' is not an image with a digest: write SGLANG=REGISTRY/sglang@sha256:..."
        exit 2
        ;;
    esac
  fi
  image=docker.io/windrow/$name:$version
  # shellcheck disable=SC2086
  buildah bud -q "${flags[@]}" ${ARGS:-} -f "deploy/images/$name/Dockerfile" -t "$image" .
  rm -f "$out/$name.tar"
  buildah push -q --digestfile "$out/$name.digest" "$image" "oci-archive:$out/$name.tar:$image"
  # Beside the archive, what is also in the image: its Python packages, as CycloneDX.
  if [ "$name" != sglang ]; then
    made=$(buildah from --pull-never "$image")
    cp "$(buildah mount "$made")/opt/windrow/sbom.cdx.json" "$out/$name.cdx.json"
    buildah rm "$made" >/dev/null
  fi
  echo "$out/$name.tar ($image@$(cat "$out/$name.digest"), $(du -h "$out/$name.tar" | cut -f1))"
done
