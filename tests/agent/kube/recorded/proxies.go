// Records which proxy Go's clients use for an address, for test_proxies.py:
//
//	go run proxies.go > proxies.json
//
// in a module that requires golang.org/x/net, whose http/httpproxy net/http uses.
package main

import (
	"encoding/json"
	"net/url"
	"os"

	"golang.org/x/net/http/httpproxy"
)

type record struct {
	HTTPS   string   `json:"https_proxy"`
	NoProxy string   `json:"no_proxy"`
	Proxy   string   `json:"proxy"`
	Proxied []string `json:"proxied"`
}

var addresses = []string{
	"https://10.96.0.1:443", "https://10.96.0.1", "https://10.97.0.1:6443", "https://127.0.0.1:6443",
	"https://127.8.0.1:6443", "https://localhost:6443", "https://LOCALHOST:6443", "https://localhost.:6443",
	"https://[::1]:6443", "https://[fd00:18::1]:443", "https://[FD00:18:0::1]:6443", "https://[::ffff:10.96.0.1]:443",
	"https://api.example.com:6443", "https://API.Example.com", "https://example.com:6443", "https://notexample.com",
	"https://kubernetes.default.svc:443", "https://kubernetes.default.svc.cluster.local", "https://api:6443",
	"http://api.example.com:8080", "https://例え.example.com",
}

var exemptions = []string{
	"", "*", " * ", ",,", ":1", ":443", "example.com", ".example.com", "*.example.com", "ample.com", "EXAMPLE.COM",
	"example.com:6443", ".example.com:443", "*.example.com:6443", "10.96.0.1", "10.96.0.1:443", "10.96.0.1:6443",
	"10.96.0.0/12", "10.96.0.0/16", "10.96.0.0/33", "10.96.0.0/12:443", "010.96.0.1", "fd00:18::1", "[fd00:18::1]",
	"[fd00:18::1]:443", "[fd00:18::1]:6443", "fd00:18::/32", "[fd00:18::]/32", "::ffff:10.96.0.1", "::ffff:10.96.0.0/108",
	"0.0.0.0/0", "::/0", ".svc,.cluster.local", "svc, cluster.local", "api", "api:443", "api:", ".", "*.", "*api",
	"localhost,10.0.0.0/8 ,.example.com", "10.96.0.1;example.com", "kubernetes.default.svc", "*,example.com",
	"example.com.", "a[b]:6443", "例え.example.com", "xn--r8jz45g.example.com", "http://example.com", "10.96.*",
}

var proxies = []string{
	"http://proxy:3128", "proxy:3128", "10.0.0.9:3128", "proxy", "https://proxy:3129", "http://user:pass@proxy:3128",
	"socks5://proxy:1080", "", "http://", "//proxy:3128", "http://[fd00:18::9]:3128",
}

func recorded(proxy, exempt string) record {
	of := (&httpproxy.Config{HTTPSProxy: proxy, NoProxy: exempt}).ProxyFunc()
	found := record{proxy, exempt, "", []string{}}
	for _, address := range addresses {
		parsed, err := url.Parse(address)
		if err != nil {
			panic(err)
		}
		used, err := of(parsed)
		if err != nil {
			panic(err)
		}
		if used != nil {
			found.Proxy = used.String()
			found.Proxied = append(found.Proxied, address)
		}
	}
	return found
}

func main() {
	var all []record
	for _, exempt := range exemptions {
		all = append(all, recorded(proxies[0], exempt))
	}
	for _, proxy := range proxies {
		all = append(all, recorded(proxy, "10.0.0.0/8,.svc"))
	}
	content, err := json.Marshal(map[string]any{"addresses": addresses, "records": all})
	if err != nil {
		panic(err)
	}
	os.Stdout.Write(append(content, '\n'))
}
