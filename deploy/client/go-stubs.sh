#!/bin/sh
# go-stubs.sh PYTHON DIRECTORY: writes the Go module podgate.io/api, the messages and stubs of the
# node-local APIs, to DIRECTORY/src, and compiles it. Go's libraries are Debian's in /usr/share/gocode,
# or those of GOPATH. PYTHON has grpcio-tools.
set -eu
python="$1"
target="$2"

for program in go protoc-gen-go protoc-gen-go-grpc; do
	if ! command -v "$program" >/dev/null; then
		echo "$program is missing; install Debian's golang-go, protoc-gen-go," \
			"protoc-gen-go-grpc and golang-google-grpc-dev, and try again" >&2
		exit 1
	fi
done

cd "$(dirname "$0")/../.."
module="$target/src/podgate.io/api"
rm -rf "$module"
mkdir -p "$module"
"$python" -m grpc_tools.protoc -I. --go_out="$target/src" --go-grpc_out="$target/src" \
	agent/client/*/*.proto agent/services/client/*/*.proto
cd "$module"
# Debian's libraries are outside of modules.
GO111MODULE=off GOPATH="$target:${GOPATH:-/usr/share/gocode}" go vet ./...
GO111MODULE=on go mod init podgate.io/api
