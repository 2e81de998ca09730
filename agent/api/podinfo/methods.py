"""Names of both APIs and their methods, without what serves them."""

PODINFO = "podgate.podinfo.v1alpha1.PodInfo"
LIST = "ListPodConditions"
WATCH = "WatchPodConditions"
GET = "GetPodConditions"

PODS = "v1alpha1.Pods"
LIST_PODS = "ListPods"
GET_POD = "GetPod"
WATCH_PODS = "WatchPods"
