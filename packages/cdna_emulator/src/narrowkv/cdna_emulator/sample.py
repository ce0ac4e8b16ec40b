"""A small kernel as text, for the examples of the documentation."""

from __future__ import annotations

DOUBLE = """
	.amdgcn_target "amdgcn-amd-amdhsa--gfx942"
	.text
double:
	s_load_dwordx4 s[4:7], s[0:1], 0x0
	v_lshlrev_b32_e32 v0, 2, v0
	s_waitcnt lgkmcnt(0)
	global_load_dword v1, v0, s[4:5]
	s_waitcnt vmcnt(0)
	v_add_f32_e32 v1, v1, v1
	global_store_dword v0, v1, s[6:7]
	s_endpgm
	.section .rodata
	.amdhsa_kernel double
		.amdhsa_next_free_vgpr 8
		.amdhsa_accum_offset 8
		.amdhsa_user_sgpr_kernarg_segment_ptr 1
		.amdhsa_user_sgpr_count 2
	.end_amdhsa_kernel
	.amdgpu_metadata
---
amdhsa.kernels:
  - .args:
      - .address_space: global
        .name: x_ptr
        .offset: 0
        .size: 8
        .value_kind: global_buffer
      - .address_space: global
        .name: out_ptr
        .offset: 8
        .size: 8
        .value_kind: global_buffer
    .kernarg_segment_size: 16
    .max_flat_workgroup_size: 64
    .wavefront_size: 64
...
	.end_amdgpu_metadata
"""  # doubles 64 fp32 numbers: one workgroup of one wave, arguments x_ptr and out_ptr
