#!/bin/sh
# Compiles kube-apiserver from the sources of Debian's package `kubernetes`, by Debian's Go, and
# unpacks Debian's etcd beside it. Nothing is installed; apt's lists are kept in a directory of its own.
#   sh kube_apiserver.sh DIRECTORY
set -eu
out=$1
work=$out/build
mkdir -p "$work/lists/partial" "$work/cache/archives/partial" "$work/root" "$work/go/src/k8s.io"
cd "$work"
command -v apt-get >/dev/null || { echo "ERROR: kube-apiserver is built on Debian alone: no apt-get"; exit 1; }
for kind in deb deb-src; do
  echo "$kind http://deb.debian.org/debian bookworm main"
done >sources.list
apt() {
  apt-get -q -o "Dir::Etc::sourcelist=$work/sources.list" -o Dir::Etc::sourceparts=- \
    -o "Dir::State::lists=$work/lists" -o "Dir::Cache=$work/cache" -o APT::Sandbox::User=root "$@"
}
apt update
apt source --only-source kubernetes
apt download golang-1.19-go golang-1.19-src etcd-server
for package in ./*.deb; do dpkg-deb -x "$package" root; done
cp root/usr/bin/etcd "$out/etcd"

cp -rL root/usr/lib/go-1.19 goroot  # whose parts are links to each other
mv kubernetes-*/ go/src/k8s.io/kubernetes
export GOROOT="$work/goroot" GOPATH="$work/go" GOCACHE="$work/gocache" GO111MODULE=off \
  CGO_ENABLED=0 GOPROXY=off PATH="$work/goroot/bin:$PATH"
cd go/src/k8s.io/kubernetes

# The one generated file that the sources lack: the schemas of the API's types.
go build -o "$work/openapi-gen" k8s.io/kubernetes/vendor/k8s.io/kube-openapi/cmd/openapi-gen
types=$(grep -rl --include=*.go '^// *+k8s:openapi-gen=true' pkg staging/src | grep -v _test |
  xargs -n1 dirname | sort -u | grep -v 'sample-\|code-generator\|testdata' |
  sed 's#^staging/src/#k8s.io/kubernetes/vendor/#; s#^pkg/#k8s.io/kubernetes/pkg/#' | paste -sd,)
"$work/openapi-gen" -i "$types" -p k8s.io/kubernetes/pkg/generated/openapi -O zz_generated.openapi \
  -h hack/boilerplate/boilerplate.generatego.txt -r /dev/null

version=k8s.io/kubernetes/vendor/k8s.io/component-base/version
go build -p 2 -trimpath -ldflags "-s -w -X $version.gitVersion=v1.20.2" \
  -o "$out/kube-apiserver" k8s.io/kubernetes/cmd/kube-apiserver
cd "$out"
rm -rf build
