/* SPDX-License-Identifier: GPL-2.0 OR Apache-2.0 */
/*
 * Who made a packet: the host, or another sender.
 *
 * ingress_ifindex survives routing, bridging and conntrack. It is 0 for packets that a host process
 * or the host kernel made. But the host can make its own packets come in again, by the loopback, a
 * veth pair within the host, macvlan, a bridge, one of its tunnels or a pod that forwards: then
 * ingress_ifindex is that interface's, and the socket is gone. So a packet that the host made gets
 * a stamp in skb->tc_index where it leaves by such an interface, gates included.
 *
 * The stamp survives what ingress_ifindex and socket do not: veth pairs, namespaces, copies,
 * decapsulation, NAT, reassembly by conntrack and fragmentation by the kernel's slow path
 * (ip6_copy_metadata). Packets of others never have it. It ends with the packet's memory: what
 * comes back from the wire, or from a process, has none.
 */
#ifndef PODGATE_ORIGIN_H
#define PODGATE_ORIGIN_H

#define LOOPBACK_IFINDEX 1 /* in every network namespace */

/*
 * No socket option sets tc_index, and a tc program or class id needs CAP_NET_ADMIN, which a pod may
 * have in its own namespace (renew_stamp_of_pod). Cilium uses the lowest bits, so the stamp has
 * none of them and they do not hide it.
 */
#define STAMP		0x7060
#define STAMP_UNPROVEN	0x7061 /* came in by an injectable interface: its socket was not seen */
#define STAMP_HAND_MADE 0x7040 /* by a process with a packet or raw socket (raw_sockets.h) */
#define STAMP_MASK	0xffc0
#define STAMP_KIND_MASK 0xffe0

/* Stamps with the verdict of a program on a host device, where the socket was still there. */
#define ADMITTED_RULE	      0x7067
#define ADMITTED_PROBE	      0x7068
#define ADMITTED_UNIDENTIFIED 0x7069

/*
 * skb->sk and skb->tc_index. With many uses of a field clang keeps its address in a register, and
 * the verifier takes no reads by such an address. So clang must not see that it is the same.
 */
ALWAYS_INLINE struct bpf_sock *socket_of(struct __sk_buff *skb)
{
	asm volatile("" : "+r"(skb));
	return skb->sk;
}

ALWAYS_INLINE __u32 stamp_of(struct __sk_buff *skb)
{
	asm volatile("" : "+r"(skb));
	return skb->tc_index;
}

ALWAYS_INLINE bool is_stamped(struct __sk_buff *skb)
{
	return (stamp_of(skb) & STAMP_MASK) == STAMP_HAND_MADE;
}

/* Whether a program has seen the packet's socket, and that it was none to write headers by. */
ALWAYS_INLINE bool had_plain_socket(struct __sk_buff *skb)
{
	__u32 value = stamp_of(skb);

	return (value & STAMP_KIND_MASK) == STAMP && value != STAMP_UNPROVEN;
}

/* tc_classid, too: the kernel copies it to tc_index when a later program returns TCX_PASS. */
ALWAYS_INLINE void stamp(struct __sk_buff *skb, __u16 value)
{
	asm volatile("" : "+r"(skb));
	skb->tc_index = value;
	skb->tc_classid = value;
}

/*
 * Open vSwitch sends a packet without a flow up to ovs-vswitchd, and sends again what comes back:
 * without socket, ingress_ifindex and tc_index, but with the priority that it came with
 * (ovs_packet_cmd_execute). So at a switch's internal port the stamp is also put into the upper
 * half of skb->priority. Its lowest bits, which qdiscs read, stay. A pod cannot forge it: veth
 * pairs clear the priority.
 */
#define PRIORITY_STAMP_SHIFT 16
#define PRIORITY_BITS	     0xf /* TC_PRIO_MAX of linux/pkt_sched.h */

ALWAYS_INLINE __u32 stamp_in_priority(struct __sk_buff *skb)
{
	asm volatile("" : "+r"(skb));
	return skb->priority >> PRIORITY_STAMP_SHIFT;
}

ALWAYS_INLINE void clear_stamp_in_priority(struct __sk_buff *skb)
{
	asm volatile("" : "+r"(skb));
	skb->priority = skb->priority & PRIORITY_BITS;
}

/* Without a switch no priority is a stamp: its upper half is the major number of a class. */
ALWAYS_INLINE bool has_ovs(void)
{
	__u32 only = 0;
	struct config *node = config.lookup(&only);

	return node && node->has_ovs;
}

/* Where a packet may enter a switch: an internal port, or the interface of a pod that forwards. */
ALWAYS_INLINE void keep_stamp(struct __sk_buff *skb)
{
	__u32 value = stamp_of(skb) << PRIORITY_STAMP_SHIFT;

	if (!is_stamped(skb) || !has_ovs())
		return;
	asm volatile("" : "+r"(skb));
	skb->priority = value | (skb->priority & PRIORITY_BITS);
}

/* For a packet without a socket. A process may choose the priority of what it sends. */
ALWAYS_INLINE void restore_stamp(struct __sk_buff *skb)
{
	__u32 value = stamp_in_priority(skb);

	if ((value & STAMP_MASK) != STAMP_HAND_MADE || skb->ingress_ifindex || is_stamped(skb) ||
	    !has_ovs())
		return;
	stamp(skb, value);
	clear_stamp_in_priority(skb);
}

/* linux/if_packet.h */
#define PACKET_LOOPBACK 5

/*
 * Whether the host made the packet. By the interfaces in the injectable map (tun, the relay) the
 * host sends what it has not made with a stamp; an interface beyond the map's end may be one. A
 * datagram to a group that the kernel has looped back (dev_loopback_xmit) comes in by the interface
 * that it leaves by, before any program there sees it, and may be routed to pods.
 */
ALWAYS_INLINE bool is_host_sent(struct __sk_buff *skb)
{
	__u32 ifindex = skb->ingress_ifindex;
	__u64 *word;
	__u32 index;

	if (ifindex <= LOOPBACK_IFINDEX || is_stamped(skb) || skb->pkt_type == PACKET_LOOPBACK)
		return true;
	index = ifindex / 64;
	word = injectable.lookup(&index);
	return !word || *word >> (ifindex % 64) & 1;
}

/*
 * A host-sent packet without anything that shows its source. The kernel made it, or it is of
 * another sender: a fragment that the kernel's slow path made (IPv6), SYNPROXY's SYN, or a packet
 * of another pod that Open vSwitch sends again. What a host process sends has a socket, or a stamp
 * where it has lost that.
 */
ALWAYS_INLINE bool has_no_origin(struct __sk_buff *skb)
{
	return !skb->sk && !skb->ingress_ifindex && !is_stamped(skb);
}

#endif
