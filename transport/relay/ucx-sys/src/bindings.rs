//! UCX's C interface. bindgen.sh made this from ucp.h of UCX 1.13 with bindgen 0.73.2; not to be edited.

pub const UCP_API_MAJOR: u32 = 1;
pub const UCP_API_MINOR: u32 = 13;
pub const UCS_MEMORY_TYPE_HOST: ucs_memory_type = 0;
pub type ucs_memory_type = ::std::os::raw::c_uint;
pub use self::ucs_memory_type as ucs_memory_type_t;
pub const UCS_OK: ucs_status_t = 0;
pub const UCS_INPROGRESS: ucs_status_t = 1;
pub const UCS_ERR_UNREACHABLE: ucs_status_t = -6;
pub const UCS_ERR_CANCELED: ucs_status_t = -16;
pub const UCS_ERR_UNSUPPORTED: ucs_status_t = -22;
pub const UCS_ERR_LAST: ucs_status_t = -100;
pub type ucs_status_t = ::std::os::raw::c_schar;
pub type ucs_status_ptr_t = *mut ::std::os::raw::c_void;
pub type __socklen_t = ::std::os::raw::c_uint;
pub type socklen_t = __socklen_t;
pub type sa_family_t = ::std::os::raw::c_ushort;
#[repr(C)]
#[derive(Debug, Copy, Clone)]
pub struct sockaddr {
    pub sa_family: sa_family_t,
    pub sa_data: [::std::os::raw::c_char; 14usize],
}
#[allow(clippy::unnecessary_operation, clippy::identity_op)]
const _: () = {
    ["Size of sockaddr"][::std::mem::size_of::<sockaddr>() - 16usize];
    ["Alignment of sockaddr"][::std::mem::align_of::<sockaddr>() - 2usize];
    ["Offset of field: sockaddr::sa_family"][::std::mem::offset_of!(sockaddr, sa_family) - 0usize];
    ["Offset of field: sockaddr::sa_data"][::std::mem::offset_of!(sockaddr, sa_data) - 2usize];
};
#[repr(C)]
#[derive(Debug, Copy, Clone)]
pub struct ucs_sock_addr {
    pub addr: *const sockaddr,
    pub addrlen: socklen_t,
}
#[allow(clippy::unnecessary_operation, clippy::identity_op)]
const _: () = {
    ["Size of ucs_sock_addr"][::std::mem::size_of::<ucs_sock_addr>() - 16usize];
    ["Alignment of ucs_sock_addr"][::std::mem::align_of::<ucs_sock_addr>() - 8usize];
    ["Offset of field: ucs_sock_addr::addr"][::std::mem::offset_of!(ucs_sock_addr, addr) - 0usize];
    ["Offset of field: ucs_sock_addr::addrlen"][::std::mem::offset_of!(ucs_sock_addr, addrlen) - 8usize];
};
pub type ucs_sock_addr_t = ucs_sock_addr;
pub type ucp_tag_recv_info_t = ucp_tag_recv_info;
#[repr(C)]
#[derive(Debug)]
pub struct ucp_context {
    _unused: [u8; 0],
}
pub type ucp_context_h = *mut ucp_context;
#[repr(C)]
#[derive(Debug)]
pub struct ucp_config {
    _unused: [u8; 0],
}
pub type ucp_config_t = ucp_config;
#[repr(C)]
#[derive(Debug)]
pub struct ucp_ep {
    _unused: [u8; 0],
}
pub type ucp_ep_h = *mut ucp_ep;
#[repr(C)]
#[derive(Debug)]
pub struct ucp_conn_request {
    _unused: [u8; 0],
}
pub type ucp_conn_request_h = *mut ucp_conn_request;
#[repr(C)]
#[derive(Debug)]
pub struct ucp_address {
    _unused: [u8; 0],
}
pub type ucp_address_t = ucp_address;
pub const UCP_ERR_HANDLING_MODE_NONE: ucp_err_handling_mode_t = 0;
pub const UCP_ERR_HANDLING_MODE_PEER: ucp_err_handling_mode_t = 1;
pub type ucp_err_handling_mode_t = ::std::os::raw::c_uint;
#[repr(C)]
#[derive(Debug)]
pub struct ucp_mem {
    _unused: [u8; 0],
}
pub type ucp_mem_h = *mut ucp_mem;
#[repr(C)]
#[derive(Debug, Copy, Clone)]
pub struct ucp_mem_attr {
    pub field_mask: u64,
    pub address: *mut ::std::os::raw::c_void,
    pub length: usize,
    pub mem_type: ucs_memory_type_t,
}
#[allow(clippy::unnecessary_operation, clippy::identity_op)]
const _: () = {
    ["Size of ucp_mem_attr"][::std::mem::size_of::<ucp_mem_attr>() - 32usize];
    ["Alignment of ucp_mem_attr"][::std::mem::align_of::<ucp_mem_attr>() - 8usize];
    ["Offset of field: ucp_mem_attr::field_mask"][::std::mem::offset_of!(ucp_mem_attr, field_mask) - 0usize];
    ["Offset of field: ucp_mem_attr::address"][::std::mem::offset_of!(ucp_mem_attr, address) - 8usize];
    ["Offset of field: ucp_mem_attr::length"][::std::mem::offset_of!(ucp_mem_attr, length) - 16usize];
    ["Offset of field: ucp_mem_attr::mem_type"][::std::mem::offset_of!(ucp_mem_attr, mem_type) - 24usize];
};
pub type ucp_mem_attr_t = ucp_mem_attr;
pub const UCP_MEM_ATTR_FIELD_ADDRESS: ucp_mem_attr_field = 1;
pub const UCP_MEM_ATTR_FIELD_LENGTH: ucp_mem_attr_field = 2;
pub type ucp_mem_attr_field = ::std::os::raw::c_uint;
#[repr(C)]
#[derive(Debug)]
pub struct ucp_worker {
    _unused: [u8; 0],
}
pub type ucp_worker_h = *mut ucp_worker;
pub type ucp_tag_t = u64;
pub type ucp_datatype_t = u64;
pub type ucp_request_init_callback_t =
    ::std::option::Option<unsafe extern "C" fn(request: *mut ::std::os::raw::c_void)>;
pub type ucp_request_cleanup_callback_t =
    ::std::option::Option<unsafe extern "C" fn(request: *mut ::std::os::raw::c_void)>;
pub type ucp_send_nbx_callback_t = ::std::option::Option<
    unsafe extern "C" fn(
        request: *mut ::std::os::raw::c_void,
        status: ucs_status_t,
        user_data: *mut ::std::os::raw::c_void,
    ),
>;
pub type ucp_err_handler_cb_t = ::std::option::Option<
    unsafe extern "C" fn(arg: *mut ::std::os::raw::c_void, ep: ucp_ep_h, status: ucs_status_t),
>;
#[repr(C)]
#[derive(Debug, Copy, Clone)]
pub struct ucp_err_handler {
    pub cb: ucp_err_handler_cb_t,
    pub arg: *mut ::std::os::raw::c_void,
}
#[allow(clippy::unnecessary_operation, clippy::identity_op)]
const _: () = {
    ["Size of ucp_err_handler"][::std::mem::size_of::<ucp_err_handler>() - 16usize];
    ["Alignment of ucp_err_handler"][::std::mem::align_of::<ucp_err_handler>() - 8usize];
    ["Offset of field: ucp_err_handler::cb"][::std::mem::offset_of!(ucp_err_handler, cb) - 0usize];
    ["Offset of field: ucp_err_handler::arg"][::std::mem::offset_of!(ucp_err_handler, arg) - 8usize];
};
pub type ucp_err_handler_t = ucp_err_handler;
pub type ucp_stream_recv_nbx_callback_t = ::std::option::Option<
    unsafe extern "C" fn(
        request: *mut ::std::os::raw::c_void,
        status: ucs_status_t,
        length: usize,
        user_data: *mut ::std::os::raw::c_void,
    ),
>;
pub type ucp_tag_recv_nbx_callback_t = ::std::option::Option<
    unsafe extern "C" fn(
        request: *mut ::std::os::raw::c_void,
        status: ucs_status_t,
        tag_info: *const ucp_tag_recv_info_t,
        user_data: *mut ::std::os::raw::c_void,
    ),
>;
pub type ucp_am_recv_data_nbx_callback_t = ::std::option::Option<
    unsafe extern "C" fn(
        request: *mut ::std::os::raw::c_void,
        status: ucs_status_t,
        length: usize,
        user_data: *mut ::std::os::raw::c_void,
    ),
>;
#[repr(C)]
#[derive(Debug, Copy, Clone)]
pub struct ucp_ep_params {
    pub field_mask: u64,
    pub address: *const ucp_address_t,
    pub err_mode: ucp_err_handling_mode_t,
    pub err_handler: ucp_err_handler_t,
    pub user_data: *mut ::std::os::raw::c_void,
    pub flags: ::std::os::raw::c_uint,
    pub sockaddr: ucs_sock_addr_t,
    pub conn_request: ucp_conn_request_h,
    pub name: *const ::std::os::raw::c_char,
    pub local_sockaddr: ucs_sock_addr_t,
}
#[allow(clippy::unnecessary_operation, clippy::identity_op)]
const _: () = {
    ["Size of ucp_ep_params"][::std::mem::size_of::<ucp_ep_params>() - 104usize];
    ["Alignment of ucp_ep_params"][::std::mem::align_of::<ucp_ep_params>() - 8usize];
    ["Offset of field: ucp_ep_params::field_mask"]
        [::std::mem::offset_of!(ucp_ep_params, field_mask) - 0usize];
    ["Offset of field: ucp_ep_params::address"][::std::mem::offset_of!(ucp_ep_params, address) - 8usize];
    ["Offset of field: ucp_ep_params::err_mode"][::std::mem::offset_of!(ucp_ep_params, err_mode) - 16usize];
    ["Offset of field: ucp_ep_params::err_handler"]
        [::std::mem::offset_of!(ucp_ep_params, err_handler) - 24usize];
    ["Offset of field: ucp_ep_params::user_data"][::std::mem::offset_of!(ucp_ep_params, user_data) - 40usize];
    ["Offset of field: ucp_ep_params::flags"][::std::mem::offset_of!(ucp_ep_params, flags) - 48usize];
    ["Offset of field: ucp_ep_params::sockaddr"][::std::mem::offset_of!(ucp_ep_params, sockaddr) - 56usize];
    ["Offset of field: ucp_ep_params::conn_request"]
        [::std::mem::offset_of!(ucp_ep_params, conn_request) - 72usize];
    ["Offset of field: ucp_ep_params::name"][::std::mem::offset_of!(ucp_ep_params, name) - 80usize];
    ["Offset of field: ucp_ep_params::local_sockaddr"]
        [::std::mem::offset_of!(ucp_ep_params, local_sockaddr) - 88usize];
};
pub type ucp_ep_params_t = ucp_ep_params;
pub const UCS_THREAD_MODE_SERIALIZED: ucs_thread_mode_t = 1;
pub type ucs_thread_mode_t = ::std::os::raw::c_uint;
pub type ucs_cpu_mask_t = ::std::os::raw::c_ulong;
#[repr(C)]
#[derive(Debug, Copy, Clone)]
pub struct ucs_cpu_set_t {
    pub ucs_bits: [ucs_cpu_mask_t; 16usize],
}
#[allow(clippy::unnecessary_operation, clippy::identity_op)]
const _: () = {
    ["Size of ucs_cpu_set_t"][::std::mem::size_of::<ucs_cpu_set_t>() - 128usize];
    ["Alignment of ucs_cpu_set_t"][::std::mem::align_of::<ucs_cpu_set_t>() - 8usize];
    ["Offset of field: ucs_cpu_set_t::ucs_bits"][::std::mem::offset_of!(ucs_cpu_set_t, ucs_bits) - 0usize];
};
pub const UCP_PARAM_FIELD_FEATURES: ucp_params_field = 1;
pub const UCP_PARAM_FIELD_MT_WORKERS_SHARED: ucp_params_field = 32;
pub type ucp_params_field = ::std::os::raw::c_uint;
pub const UCP_FEATURE_TAG: ucp_feature = 1;
pub const UCP_FEATURE_RMA: ucp_feature = 2;
pub type ucp_feature = ::std::os::raw::c_uint;
pub const UCP_WORKER_PARAM_FIELD_THREAD_MODE: ucp_worker_params_field = 1;
pub type ucp_worker_params_field = ::std::os::raw::c_uint;
pub const UCP_EP_PARAM_FIELD_REMOTE_ADDRESS: ucp_ep_params_field = 1;
pub const UCP_EP_PARAM_FIELD_ERR_HANDLING_MODE: ucp_ep_params_field = 2;
pub const UCP_EP_PARAM_FIELD_ERR_HANDLER: ucp_ep_params_field = 4;
pub type ucp_ep_params_field = ::std::os::raw::c_uint;
pub const UCP_EP_CLOSE_FLAG_FORCE: ucp_ep_close_flags_t = 1;
pub type ucp_ep_close_flags_t = ::std::os::raw::c_uint;
pub const UCP_MEM_MAP_PARAM_FIELD_ADDRESS: ucp_mem_map_params_field = 1;
pub const UCP_MEM_MAP_PARAM_FIELD_LENGTH: ucp_mem_map_params_field = 2;
pub const UCP_MEM_MAP_PARAM_FIELD_FLAGS: ucp_mem_map_params_field = 4;
pub type ucp_mem_map_params_field = ::std::os::raw::c_uint;
pub const UCP_MEM_MAP_ALLOCATE: _bindgen_ty_4 = 2;
pub type _bindgen_ty_4 = ::std::os::raw::c_uint;
pub const UCP_OP_ATTR_FIELD_FLAGS: ucp_op_attr_t = 16;
pub const UCP_OP_ATTR_FLAG_NO_IMM_CMPL: ucp_op_attr_t = 65536;
pub type ucp_op_attr_t = ::std::os::raw::c_uint;
#[repr(C)]
#[derive(Debug, Copy, Clone)]
pub struct ucp_params {
    pub field_mask: u64,
    pub features: u64,
    pub request_size: usize,
    pub request_init: ucp_request_init_callback_t,
    pub request_cleanup: ucp_request_cleanup_callback_t,
    pub tag_sender_mask: u64,
    pub mt_workers_shared: ::std::os::raw::c_int,
    pub estimated_num_eps: usize,
    pub estimated_num_ppn: usize,
    pub name: *const ::std::os::raw::c_char,
}
#[allow(clippy::unnecessary_operation, clippy::identity_op)]
const _: () = {
    ["Size of ucp_params"][::std::mem::size_of::<ucp_params>() - 80usize];
    ["Alignment of ucp_params"][::std::mem::align_of::<ucp_params>() - 8usize];
    ["Offset of field: ucp_params::field_mask"][::std::mem::offset_of!(ucp_params, field_mask) - 0usize];
    ["Offset of field: ucp_params::features"][::std::mem::offset_of!(ucp_params, features) - 8usize];
    ["Offset of field: ucp_params::request_size"][::std::mem::offset_of!(ucp_params, request_size) - 16usize];
    ["Offset of field: ucp_params::request_init"][::std::mem::offset_of!(ucp_params, request_init) - 24usize];
    ["Offset of field: ucp_params::request_cleanup"]
        [::std::mem::offset_of!(ucp_params, request_cleanup) - 32usize];
    ["Offset of field: ucp_params::tag_sender_mask"]
        [::std::mem::offset_of!(ucp_params, tag_sender_mask) - 40usize];
    ["Offset of field: ucp_params::mt_workers_shared"]
        [::std::mem::offset_of!(ucp_params, mt_workers_shared) - 48usize];
    ["Offset of field: ucp_params::estimated_num_eps"]
        [::std::mem::offset_of!(ucp_params, estimated_num_eps) - 56usize];
    ["Offset of field: ucp_params::estimated_num_ppn"]
        [::std::mem::offset_of!(ucp_params, estimated_num_ppn) - 64usize];
    ["Offset of field: ucp_params::name"][::std::mem::offset_of!(ucp_params, name) - 72usize];
};
pub type ucp_params_t = ucp_params;
#[repr(C)]
#[derive(Debug, Copy, Clone)]
pub struct ucp_worker_params {
    pub field_mask: u64,
    pub thread_mode: ucs_thread_mode_t,
    pub cpu_mask: ucs_cpu_set_t,
    pub events: ::std::os::raw::c_uint,
    pub user_data: *mut ::std::os::raw::c_void,
    pub event_fd: ::std::os::raw::c_int,
    pub flags: u64,
    pub name: *const ::std::os::raw::c_char,
    pub am_alignment: usize,
    pub client_id: u64,
}
#[allow(clippy::unnecessary_operation, clippy::identity_op)]
const _: () = {
    ["Size of ucp_worker_params"][::std::mem::size_of::<ucp_worker_params>() - 200usize];
    ["Alignment of ucp_worker_params"][::std::mem::align_of::<ucp_worker_params>() - 8usize];
    ["Offset of field: ucp_worker_params::field_mask"]
        [::std::mem::offset_of!(ucp_worker_params, field_mask) - 0usize];
    ["Offset of field: ucp_worker_params::thread_mode"]
        [::std::mem::offset_of!(ucp_worker_params, thread_mode) - 8usize];
    ["Offset of field: ucp_worker_params::cpu_mask"]
        [::std::mem::offset_of!(ucp_worker_params, cpu_mask) - 16usize];
    ["Offset of field: ucp_worker_params::events"]
        [::std::mem::offset_of!(ucp_worker_params, events) - 144usize];
    ["Offset of field: ucp_worker_params::user_data"]
        [::std::mem::offset_of!(ucp_worker_params, user_data) - 152usize];
    ["Offset of field: ucp_worker_params::event_fd"]
        [::std::mem::offset_of!(ucp_worker_params, event_fd) - 160usize];
    ["Offset of field: ucp_worker_params::flags"]
        [::std::mem::offset_of!(ucp_worker_params, flags) - 168usize];
    ["Offset of field: ucp_worker_params::name"][::std::mem::offset_of!(ucp_worker_params, name) - 176usize];
    ["Offset of field: ucp_worker_params::am_alignment"]
        [::std::mem::offset_of!(ucp_worker_params, am_alignment) - 184usize];
    ["Offset of field: ucp_worker_params::client_id"]
        [::std::mem::offset_of!(ucp_worker_params, client_id) - 192usize];
};
pub type ucp_worker_params_t = ucp_worker_params;
#[repr(C)]
#[derive(Debug, Copy, Clone)]
pub struct ucp_mem_map_params {
    pub field_mask: u64,
    pub address: *mut ::std::os::raw::c_void,
    pub length: usize,
    pub flags: ::std::os::raw::c_uint,
    pub prot: ::std::os::raw::c_uint,
    pub memory_type: ucs_memory_type_t,
}
#[allow(clippy::unnecessary_operation, clippy::identity_op)]
const _: () = {
    ["Size of ucp_mem_map_params"][::std::mem::size_of::<ucp_mem_map_params>() - 40usize];
    ["Alignment of ucp_mem_map_params"][::std::mem::align_of::<ucp_mem_map_params>() - 8usize];
    ["Offset of field: ucp_mem_map_params::field_mask"]
        [::std::mem::offset_of!(ucp_mem_map_params, field_mask) - 0usize];
    ["Offset of field: ucp_mem_map_params::address"]
        [::std::mem::offset_of!(ucp_mem_map_params, address) - 8usize];
    ["Offset of field: ucp_mem_map_params::length"]
        [::std::mem::offset_of!(ucp_mem_map_params, length) - 16usize];
    ["Offset of field: ucp_mem_map_params::flags"]
        [::std::mem::offset_of!(ucp_mem_map_params, flags) - 24usize];
    ["Offset of field: ucp_mem_map_params::prot"][::std::mem::offset_of!(ucp_mem_map_params, prot) - 28usize];
    ["Offset of field: ucp_mem_map_params::memory_type"]
        [::std::mem::offset_of!(ucp_mem_map_params, memory_type) - 32usize];
};
pub type ucp_mem_map_params_t = ucp_mem_map_params;
#[repr(C)]
#[derive(Debug, Copy, Clone)]
pub struct ucp_tag_recv_info {
    pub sender_tag: ucp_tag_t,
    pub length: usize,
}
#[allow(clippy::unnecessary_operation, clippy::identity_op)]
const _: () = {
    ["Size of ucp_tag_recv_info"][::std::mem::size_of::<ucp_tag_recv_info>() - 16usize];
    ["Alignment of ucp_tag_recv_info"][::std::mem::align_of::<ucp_tag_recv_info>() - 8usize];
    ["Offset of field: ucp_tag_recv_info::sender_tag"]
        [::std::mem::offset_of!(ucp_tag_recv_info, sender_tag) - 0usize];
    ["Offset of field: ucp_tag_recv_info::length"]
        [::std::mem::offset_of!(ucp_tag_recv_info, length) - 8usize];
};
#[repr(C)]
#[derive(Copy, Clone)]
pub struct ucp_request_param_t {
    pub op_attr_mask: u32,
    pub flags: u32,
    pub request: *mut ::std::os::raw::c_void,
    pub cb: ucp_request_param_t__bindgen_ty_1,
    pub datatype: ucp_datatype_t,
    pub user_data: *mut ::std::os::raw::c_void,
    pub reply_buffer: *mut ::std::os::raw::c_void,
    pub memory_type: ucs_memory_type_t,
    pub recv_info: ucp_request_param_t__bindgen_ty_2,
    pub memh: ucp_mem_h,
}
#[repr(C)]
#[derive(Copy, Clone)]
pub union ucp_request_param_t__bindgen_ty_1 {
    pub send: ucp_send_nbx_callback_t,
    pub recv: ucp_tag_recv_nbx_callback_t,
    pub recv_stream: ucp_stream_recv_nbx_callback_t,
    pub recv_am: ucp_am_recv_data_nbx_callback_t,
}
#[allow(clippy::unnecessary_operation, clippy::identity_op)]
const _: () = {
    ["Size of ucp_request_param_t__bindgen_ty_1"]
        [::std::mem::size_of::<ucp_request_param_t__bindgen_ty_1>() - 8usize];
    ["Alignment of ucp_request_param_t__bindgen_ty_1"]
        [::std::mem::align_of::<ucp_request_param_t__bindgen_ty_1>() - 8usize];
    ["Offset of field: ucp_request_param_t__bindgen_ty_1::send"]
        [::std::mem::offset_of!(ucp_request_param_t__bindgen_ty_1, send) - 0usize];
    ["Offset of field: ucp_request_param_t__bindgen_ty_1::recv"]
        [::std::mem::offset_of!(ucp_request_param_t__bindgen_ty_1, recv) - 0usize];
    ["Offset of field: ucp_request_param_t__bindgen_ty_1::recv_stream"]
        [::std::mem::offset_of!(ucp_request_param_t__bindgen_ty_1, recv_stream) - 0usize];
    ["Offset of field: ucp_request_param_t__bindgen_ty_1::recv_am"]
        [::std::mem::offset_of!(ucp_request_param_t__bindgen_ty_1, recv_am) - 0usize];
};
#[repr(C)]
#[derive(Copy, Clone)]
pub union ucp_request_param_t__bindgen_ty_2 {
    pub length: *mut usize,
    pub tag_info: *mut ucp_tag_recv_info_t,
}
#[allow(clippy::unnecessary_operation, clippy::identity_op)]
const _: () = {
    ["Size of ucp_request_param_t__bindgen_ty_2"]
        [::std::mem::size_of::<ucp_request_param_t__bindgen_ty_2>() - 8usize];
    ["Alignment of ucp_request_param_t__bindgen_ty_2"]
        [::std::mem::align_of::<ucp_request_param_t__bindgen_ty_2>() - 8usize];
    ["Offset of field: ucp_request_param_t__bindgen_ty_2::length"]
        [::std::mem::offset_of!(ucp_request_param_t__bindgen_ty_2, length) - 0usize];
    ["Offset of field: ucp_request_param_t__bindgen_ty_2::tag_info"]
        [::std::mem::offset_of!(ucp_request_param_t__bindgen_ty_2, tag_info) - 0usize];
};
#[allow(clippy::unnecessary_operation, clippy::identity_op)]
const _: () = {
    ["Size of ucp_request_param_t"][::std::mem::size_of::<ucp_request_param_t>() - 72usize];
    ["Alignment of ucp_request_param_t"][::std::mem::align_of::<ucp_request_param_t>() - 8usize];
    ["Offset of field: ucp_request_param_t::op_attr_mask"]
        [::std::mem::offset_of!(ucp_request_param_t, op_attr_mask) - 0usize];
    ["Offset of field: ucp_request_param_t::flags"]
        [::std::mem::offset_of!(ucp_request_param_t, flags) - 4usize];
    ["Offset of field: ucp_request_param_t::request"]
        [::std::mem::offset_of!(ucp_request_param_t, request) - 8usize];
    ["Offset of field: ucp_request_param_t::cb"][::std::mem::offset_of!(ucp_request_param_t, cb) - 16usize];
    ["Offset of field: ucp_request_param_t::datatype"]
        [::std::mem::offset_of!(ucp_request_param_t, datatype) - 24usize];
    ["Offset of field: ucp_request_param_t::user_data"]
        [::std::mem::offset_of!(ucp_request_param_t, user_data) - 32usize];
    ["Offset of field: ucp_request_param_t::reply_buffer"]
        [::std::mem::offset_of!(ucp_request_param_t, reply_buffer) - 40usize];
    ["Offset of field: ucp_request_param_t::memory_type"]
        [::std::mem::offset_of!(ucp_request_param_t, memory_type) - 48usize];
    ["Offset of field: ucp_request_param_t::recv_info"]
        [::std::mem::offset_of!(ucp_request_param_t, recv_info) - 56usize];
    ["Offset of field: ucp_request_param_t::memh"]
        [::std::mem::offset_of!(ucp_request_param_t, memh) - 64usize];
};
pub struct Ucp {
    __library: ::libloading::Library,
    pub ucs_status_string: unsafe extern "C" fn(status: ucs_status_t) -> *const ::std::os::raw::c_char,
    pub ucp_config_read: unsafe extern "C" fn(
        env_prefix: *const ::std::os::raw::c_char,
        filename: *const ::std::os::raw::c_char,
        config_p: *mut *mut ucp_config_t,
    ) -> ucs_status_t,
    pub ucp_config_release: unsafe extern "C" fn(config: *mut ucp_config_t),
    pub ucp_config_modify: unsafe extern "C" fn(
        config: *mut ucp_config_t,
        name: *const ::std::os::raw::c_char,
        value: *const ::std::os::raw::c_char,
    ) -> ucs_status_t,
    pub ucp_get_version_string: unsafe extern "C" fn() -> *const ::std::os::raw::c_char,
    pub ucp_init_version: unsafe extern "C" fn(
        api_major_version: ::std::os::raw::c_uint,
        api_minor_version: ::std::os::raw::c_uint,
        params: *const ucp_params_t,
        config: *const ucp_config_t,
        context_p: *mut ucp_context_h,
    ) -> ucs_status_t,
    pub ucp_cleanup: unsafe extern "C" fn(context_p: ucp_context_h),
    pub ucp_worker_create: unsafe extern "C" fn(
        context: ucp_context_h,
        params: *const ucp_worker_params_t,
        worker_p: *mut ucp_worker_h,
    ) -> ucs_status_t,
    pub ucp_worker_destroy: unsafe extern "C" fn(worker: ucp_worker_h),
    pub ucp_worker_get_address: unsafe extern "C" fn(
        worker: ucp_worker_h,
        address_p: *mut *mut ucp_address_t,
        address_length_p: *mut usize,
    ) -> ucs_status_t,
    pub ucp_worker_release_address: unsafe extern "C" fn(worker: ucp_worker_h, address: *mut ucp_address_t),
    pub ucp_worker_progress: unsafe extern "C" fn(worker: ucp_worker_h) -> ::std::os::raw::c_uint,
    pub ucp_ep_create: unsafe extern "C" fn(
        worker: ucp_worker_h,
        params: *const ucp_ep_params_t,
        ep_p: *mut ucp_ep_h,
    ) -> ucs_status_t,
    pub ucp_ep_close_nbx:
        unsafe extern "C" fn(ep: ucp_ep_h, param: *const ucp_request_param_t) -> ucs_status_ptr_t,
    pub ucp_mem_map: unsafe extern "C" fn(
        context: ucp_context_h,
        params: *const ucp_mem_map_params_t,
        memh_p: *mut ucp_mem_h,
    ) -> ucs_status_t,
    pub ucp_mem_unmap: unsafe extern "C" fn(context: ucp_context_h, memh: ucp_mem_h) -> ucs_status_t,
    pub ucp_mem_query: unsafe extern "C" fn(memh: ucp_mem_h, attr: *mut ucp_mem_attr_t) -> ucs_status_t,
    pub ucp_tag_send_nbx: unsafe extern "C" fn(
        ep: ucp_ep_h,
        buffer: *const ::std::os::raw::c_void,
        count: usize,
        tag: ucp_tag_t,
        param: *const ucp_request_param_t,
    ) -> ucs_status_ptr_t,
    pub ucp_tag_recv_nbx: unsafe extern "C" fn(
        worker: ucp_worker_h,
        buffer: *mut ::std::os::raw::c_void,
        count: usize,
        tag: ucp_tag_t,
        tag_mask: ucp_tag_t,
        param: *const ucp_request_param_t,
    ) -> ucs_status_ptr_t,
    pub ucp_request_check_status: unsafe extern "C" fn(request: *mut ::std::os::raw::c_void) -> ucs_status_t,
    pub ucp_tag_recv_request_test: unsafe extern "C" fn(
        request: *mut ::std::os::raw::c_void,
        info: *mut ucp_tag_recv_info_t,
    ) -> ucs_status_t,
    pub ucp_request_cancel: unsafe extern "C" fn(worker: ucp_worker_h, request: *mut ::std::os::raw::c_void),
    pub ucp_request_free: unsafe extern "C" fn(request: *mut ::std::os::raw::c_void),
}
impl Ucp {
    pub unsafe fn new<P>(path: P) -> Result<Self, ::libloading::Error>
    where
        P: AsRef<::std::ffi::OsStr>,
    {
        let path = path.as_ref();
        let library = unsafe { ::libloading::Library::new(path) }?;
        unsafe { Self::from_library(library) }
    }
    pub unsafe fn from_library<L>(library: L) -> Result<Self, ::libloading::Error>
    where
        L: Into<::libloading::Library>,
    {
        let __library = library.into();
        let ucs_status_string = unsafe { __library.get(b"ucs_status_string\0") }.map(|sym| *sym)?;
        let ucp_config_read = unsafe { __library.get(b"ucp_config_read\0") }.map(|sym| *sym)?;
        let ucp_config_release = unsafe { __library.get(b"ucp_config_release\0") }.map(|sym| *sym)?;
        let ucp_config_modify = unsafe { __library.get(b"ucp_config_modify\0") }.map(|sym| *sym)?;
        let ucp_get_version_string = unsafe { __library.get(b"ucp_get_version_string\0") }.map(|sym| *sym)?;
        let ucp_init_version = unsafe { __library.get(b"ucp_init_version\0") }.map(|sym| *sym)?;
        let ucp_cleanup = unsafe { __library.get(b"ucp_cleanup\0") }.map(|sym| *sym)?;
        let ucp_worker_create = unsafe { __library.get(b"ucp_worker_create\0") }.map(|sym| *sym)?;
        let ucp_worker_destroy = unsafe { __library.get(b"ucp_worker_destroy\0") }.map(|sym| *sym)?;
        let ucp_worker_get_address = unsafe { __library.get(b"ucp_worker_get_address\0") }.map(|sym| *sym)?;
        let ucp_worker_release_address =
            unsafe { __library.get(b"ucp_worker_release_address\0") }.map(|sym| *sym)?;
        let ucp_worker_progress = unsafe { __library.get(b"ucp_worker_progress\0") }.map(|sym| *sym)?;
        let ucp_ep_create = unsafe { __library.get(b"ucp_ep_create\0") }.map(|sym| *sym)?;
        let ucp_ep_close_nbx = unsafe { __library.get(b"ucp_ep_close_nbx\0") }.map(|sym| *sym)?;
        let ucp_mem_map = unsafe { __library.get(b"ucp_mem_map\0") }.map(|sym| *sym)?;
        let ucp_mem_unmap = unsafe { __library.get(b"ucp_mem_unmap\0") }.map(|sym| *sym)?;
        let ucp_mem_query = unsafe { __library.get(b"ucp_mem_query\0") }.map(|sym| *sym)?;
        let ucp_tag_send_nbx = unsafe { __library.get(b"ucp_tag_send_nbx\0") }.map(|sym| *sym)?;
        let ucp_tag_recv_nbx = unsafe { __library.get(b"ucp_tag_recv_nbx\0") }.map(|sym| *sym)?;
        let ucp_request_check_status =
            unsafe { __library.get(b"ucp_request_check_status\0") }.map(|sym| *sym)?;
        let ucp_tag_recv_request_test =
            unsafe { __library.get(b"ucp_tag_recv_request_test\0") }.map(|sym| *sym)?;
        let ucp_request_cancel = unsafe { __library.get(b"ucp_request_cancel\0") }.map(|sym| *sym)?;
        let ucp_request_free = unsafe { __library.get(b"ucp_request_free\0") }.map(|sym| *sym)?;
        Ok(Ucp {
            __library,
            ucs_status_string,
            ucp_config_read,
            ucp_config_release,
            ucp_config_modify,
            ucp_get_version_string,
            ucp_init_version,
            ucp_cleanup,
            ucp_worker_create,
            ucp_worker_destroy,
            ucp_worker_get_address,
            ucp_worker_release_address,
            ucp_worker_progress,
            ucp_ep_create,
            ucp_ep_close_nbx,
            ucp_mem_map,
            ucp_mem_unmap,
            ucp_mem_query,
            ucp_tag_send_nbx,
            ucp_tag_recv_nbx,
            ucp_request_check_status,
            ucp_tag_recv_request_test,
            ucp_request_cancel,
            ucp_request_free,
        })
    }
    pub unsafe fn ucs_status_string(&self, status: ucs_status_t) -> *const ::std::os::raw::c_char {
        unsafe { (self.ucs_status_string)(status) }
    }
    pub unsafe fn ucp_config_read(
        &self,
        env_prefix: *const ::std::os::raw::c_char,
        filename: *const ::std::os::raw::c_char,
        config_p: *mut *mut ucp_config_t,
    ) -> ucs_status_t {
        unsafe { (self.ucp_config_read)(env_prefix, filename, config_p) }
    }
    pub unsafe fn ucp_config_release(&self, config: *mut ucp_config_t) {
        unsafe { (self.ucp_config_release)(config) }
    }
    pub unsafe fn ucp_config_modify(
        &self,
        config: *mut ucp_config_t,
        name: *const ::std::os::raw::c_char,
        value: *const ::std::os::raw::c_char,
    ) -> ucs_status_t {
        unsafe { (self.ucp_config_modify)(config, name, value) }
    }
    pub unsafe fn ucp_get_version_string(&self) -> *const ::std::os::raw::c_char {
        unsafe { (self.ucp_get_version_string)() }
    }
    pub unsafe fn ucp_init_version(
        &self,
        api_major_version: ::std::os::raw::c_uint,
        api_minor_version: ::std::os::raw::c_uint,
        params: *const ucp_params_t,
        config: *const ucp_config_t,
        context_p: *mut ucp_context_h,
    ) -> ucs_status_t {
        unsafe { (self.ucp_init_version)(api_major_version, api_minor_version, params, config, context_p) }
    }
    pub unsafe fn ucp_cleanup(&self, context_p: ucp_context_h) {
        unsafe { (self.ucp_cleanup)(context_p) }
    }
    pub unsafe fn ucp_worker_create(
        &self,
        context: ucp_context_h,
        params: *const ucp_worker_params_t,
        worker_p: *mut ucp_worker_h,
    ) -> ucs_status_t {
        unsafe { (self.ucp_worker_create)(context, params, worker_p) }
    }
    pub unsafe fn ucp_worker_destroy(&self, worker: ucp_worker_h) {
        unsafe { (self.ucp_worker_destroy)(worker) }
    }
    pub unsafe fn ucp_worker_get_address(
        &self,
        worker: ucp_worker_h,
        address_p: *mut *mut ucp_address_t,
        address_length_p: *mut usize,
    ) -> ucs_status_t {
        unsafe { (self.ucp_worker_get_address)(worker, address_p, address_length_p) }
    }
    pub unsafe fn ucp_worker_release_address(&self, worker: ucp_worker_h, address: *mut ucp_address_t) {
        unsafe { (self.ucp_worker_release_address)(worker, address) }
    }
    pub unsafe fn ucp_worker_progress(&self, worker: ucp_worker_h) -> ::std::os::raw::c_uint {
        unsafe { (self.ucp_worker_progress)(worker) }
    }
    pub unsafe fn ucp_ep_create(
        &self,
        worker: ucp_worker_h,
        params: *const ucp_ep_params_t,
        ep_p: *mut ucp_ep_h,
    ) -> ucs_status_t {
        unsafe { (self.ucp_ep_create)(worker, params, ep_p) }
    }
    pub unsafe fn ucp_ep_close_nbx(
        &self,
        ep: ucp_ep_h,
        param: *const ucp_request_param_t,
    ) -> ucs_status_ptr_t {
        unsafe { (self.ucp_ep_close_nbx)(ep, param) }
    }
    pub unsafe fn ucp_mem_map(
        &self,
        context: ucp_context_h,
        params: *const ucp_mem_map_params_t,
        memh_p: *mut ucp_mem_h,
    ) -> ucs_status_t {
        unsafe { (self.ucp_mem_map)(context, params, memh_p) }
    }
    pub unsafe fn ucp_mem_unmap(&self, context: ucp_context_h, memh: ucp_mem_h) -> ucs_status_t {
        unsafe { (self.ucp_mem_unmap)(context, memh) }
    }
    pub unsafe fn ucp_mem_query(&self, memh: ucp_mem_h, attr: *mut ucp_mem_attr_t) -> ucs_status_t {
        unsafe { (self.ucp_mem_query)(memh, attr) }
    }
    pub unsafe fn ucp_tag_send_nbx(
        &self,
        ep: ucp_ep_h,
        buffer: *const ::std::os::raw::c_void,
        count: usize,
        tag: ucp_tag_t,
        param: *const ucp_request_param_t,
    ) -> ucs_status_ptr_t {
        unsafe { (self.ucp_tag_send_nbx)(ep, buffer, count, tag, param) }
    }
    pub unsafe fn ucp_tag_recv_nbx(
        &self,
        worker: ucp_worker_h,
        buffer: *mut ::std::os::raw::c_void,
        count: usize,
        tag: ucp_tag_t,
        tag_mask: ucp_tag_t,
        param: *const ucp_request_param_t,
    ) -> ucs_status_ptr_t {
        unsafe { (self.ucp_tag_recv_nbx)(worker, buffer, count, tag, tag_mask, param) }
    }
    pub unsafe fn ucp_request_check_status(&self, request: *mut ::std::os::raw::c_void) -> ucs_status_t {
        unsafe { (self.ucp_request_check_status)(request) }
    }
    pub unsafe fn ucp_tag_recv_request_test(
        &self,
        request: *mut ::std::os::raw::c_void,
        info: *mut ucp_tag_recv_info_t,
    ) -> ucs_status_t {
        unsafe { (self.ucp_tag_recv_request_test)(request, info) }
    }
    pub unsafe fn ucp_request_cancel(&self, worker: ucp_worker_h, request: *mut ::std::os::raw::c_void) {
        unsafe { (self.ucp_request_cancel)(worker, request) }
    }
    pub unsafe fn ucp_request_free(&self, request: *mut ::std::os::raw::c_void) {
        unsafe { (self.ucp_request_free)(request) }
    }
}
