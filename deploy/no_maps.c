/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Preloaded when an image is built: bcc creates the maps of the sources to compile them, and a
 * build has no CAP_BPF. These replace libbpf's functions; the compiler needs different numbers as
 * descriptors, and the artefacts name the maps instead.
 */
struct bpf_map_create_opts;

int bpf_map_create(int type, const char *name, unsigned int key_size, unsigned int value_size,
		   unsigned int max_entries, const struct bpf_map_create_opts *options);

int bpf_map_create(int type, const char *name, unsigned int key_size, unsigned int value_size,
		   unsigned int max_entries, const struct bpf_map_create_opts *options)
{
	static int next = 1 << 20; /* above the descriptors of the process, which closes them */

	(void)type, (void)name, (void)key_size, (void)value_size, (void)max_entries, (void)options;
	return next++;
}
