#!/bin/sh
# Writes src/bindings.rs from UCX's headers. Needs bindgen 0.73 (cargo install bindgen-cli), libclang and libucx-dev 1.13:
# what is bound to the oldest headers that are supported exists in all later releases.
set -eu
cd "$(dirname "$0")"
functions='ucp_(get_version_string|config_read|config_modify|config_release|init_version|cleanup'
functions="$functions|worker_create|worker_destroy|worker_progress|worker_get_address|worker_release_address"
functions="$functions|ep_create|ep_close_nbx|tag_send_nbx|tag_recv_nbx"
functions="$functions|mem_map|mem_query|mem_unmap"
functions="$functions|request_check_status|tag_recv_request_test|request_cancel|request_free)|ucs_status_string"
masks='ucp_(params_field|feature|worker_params_field|ep_params_field|mem_map_params_field|mem_attr_field|op_attr_t|ep_close_flags_t)'
version=$(sed -n 's/^#define UCP_API_M[AI][JN]OR *//p' /usr/include/ucp/api/ucp_version.h | paste -sd.)
bindgen /usr/include/ucp/api/ucp.h --output src/bindings.rs \
    --dynamic-loading Ucp --dynamic-link-require-all --wrap-unsafe-ops \
    --allowlist-function "$functions" --allowlist-type "$masks" --allowlist-var 'UCP_API_(MAJOR|MINOR)|UCP_MEM_MAP_ALLOCATE' \
    --default-enum-style consts --no-prepend-enum-name --no-doc-comments \
    --disable-header-comment \
    --raw-line "//! UCX's C interface. bindgen.sh made this from ucp.h of UCX $version with $(bindgen --version); not to be edited."
# bindgen takes all values of an enumeration or none. Those that no source names are dropped.
grep -rhoE 'UC[PS]_[A-Z0-9_]+' src/lib.rs ../src ../tests ../benches | sort -u > names
awk 'NR == FNR { named[$0]; next }
    !skips && /^pub const / { name = $3; sub(":", "", name); skips = !(name in named) }
    skips { if (/;$/) skips = 0; next }
    { print }' names src/bindings.rs > kept
mv kept src/bindings.rs
rm names
