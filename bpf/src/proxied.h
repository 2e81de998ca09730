/* SPDX-License-Identifier: GPL-2.0 OR Apache-2.0 */
/*
 * Which of the kubelet's flows a relay proxies (relay.c redirects them), and which ones bypass it.
 */
#ifndef PODGATE_PROXIED_H
#define PODGATE_PROXIED_H

/* Connects to a hung relay would hang. A relay that never beat counts as having beaten at boot. */
ALWAYS_INLINE bool is_relay_alive(void)
{
	__u32 only = 0;
	__u64 *beat_ns = relay_beat.lookup(&only);

	return beat_ns && age_ns(bpf_ktime_get_ns(), *beat_ns) < RELAY_BEAT_LIMIT_NS;
}

/*
 * The relay's address for a pod's port, and what it represents; NULL if no relay proxies the port.
 * The memory of a deleted entry may be reused for another one while it is read here, so the pod of
 * the relay's address is compared, too.
 */
ALWAYS_INLINE struct relay_pod *find_relay(struct address *pod, __u16 port, struct address *relay)
{
	struct relay_target_key target = {.pod = *pod, .port = port};
	struct relay_pod *origin;
	struct address *found;

	found = relay_targets.lookup(&target);
	if (!found) {
		target.port = 0;
		found = relay_targets.lookup(&target);
	}
	if (!found)
		return 0;
	*relay = *found;
	origin = relay_pods.lookup(relay);
	return origin && is_same_address(&origin->pod, pod) ? origin : 0;
}

/*
 * Whether a socket of the kubelet's cgroup opens a TCP connection past the relay that proxies this
 * pod's port. A raw or packet socket does. A TCP socket does if a serving relay's hook saw its
 * connect(2), and either did not redirect it, though it was to this pod, or it was to another
 * address, which was translated to the pod's: that is admitted if a probe of the pod names a host.
 *
 * A connect that no hook saw is from a time without a serving relay, so it bypasses none. Therefore
 * the kubelet's next connect passes at the instant at which the relay's process ends and its hooks
 * with it, although the heartbeat is not stale yet.
 */
ALWAYS_INLINE bool bypasses_relay(struct __sk_buff *skb, struct packet *packet)
{
	struct address nowhere = {};
	struct address *connected;
	struct relay_pod *origin;
	struct address relay;
	struct bpf_sock *sk;
	__u64 cookie;

	if (packet->protocol != IPPROTO_TCP || !is_relay_alive())
		return false;
	origin = find_relay(&packet->destination, packet->destination_port, &relay);
	if (!origin)
		return false;
	/* Otherwise the compiler keeps the field's address, by which the verifier rejects reads. */
	asm volatile("" : "+r"(skb));
	sk = skb->sk;
	if (!sk)
		return false;
	sk = bpf_sk_fullsock(sk);
	if (!sk) /* request and TIME-WAIT sockets open nothing */
		return false;
	if (sk->type != SOCK_STREAM || sk->protocol != IPPROTO_TCP)
		return true;
	cookie = bpf_get_socket_cookie(skb);
	connected = relay_bypasses.lookup(&cookie);
	if (!connected || is_same_address(connected, &packet->destination))
		return false;
	return !origin->admits_translated || is_same_address(connected, &nowhere);
}

#endif
