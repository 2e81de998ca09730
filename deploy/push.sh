#!/bin/sh
# push.sh ARCHIVE REGISTRY: pushes podgate's image, as `make image` has packed it, to
# REGISTRY/podgate:VERSION. Credentials are those of `skopeo login` and `docker login`. A registry on
# this machine may speak HTTP.
set -eu

fail() {
	echo "podgate push: $*" >&2
	exit 1
}

archive="$1"
registry="${2:-}"
[ -n "$registry" ] || fail "name a registry: make push REGISTRY=registry.example:5000"
command -v skopeo >/dev/null || fail "skopeo is missing; install it with 'apt-get install skopeo'"
case "$registry" in
localhost:* | 127.0.0.1:* | "[::1]:"*) verified=false ;;
*) verified=true ;;
esac
image="$(skopeo inspect --format '{{index .Labels "org.opencontainers.image.version"}}' "oci-archive:$archive")"
image="$registry/podgate:$image"
digest="$(mktemp)"
trap 'rm -f "$digest"' EXIT
skopeo copy --quiet --digestfile "$digest" --dest-tls-verify="$verified" \
	"oci-archive:$archive" "docker://$image" || fail "$image was not pushed"
echo "$image@$(cat "$digest")"
