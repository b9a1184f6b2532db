//! Layouts and tables by themselves: what is refused, and what becomes of the elements of one tensor.

use super::*;

/// Where the positions, new values and old values lie of a tensor that has them at bytes 64, 128 and 192.
fn places(arrays: [u64; 3]) -> impl Fn(u64) -> u64 {
    move |byte| arrays[(byte / 64 - 1) as usize]
}

#[test]
fn many_blocks_are_shared_by_threads_and_all_is_taken_back() {
    // One large tensor: several turns of several threads.
    let mut bytes = vec![1u8; 1 << 20];
    let storage =
        LiveTensor { name: "w".into(), dtype: Dtype::U8, address: bytes.as_mut_ptr() as u64, bytes: 1 << 20 };
    let info = TensorInfo { name: "w".into(), dtype: Dtype::U8, shape: vec![1 << 20] };
    let run = || Strides { offset: 0, strides: vec![1] };
    let copy = LiveCopy { tensor: 0, live: 0, size: vec![1 << 20], from: run(), to: run(), table: None };
    // SAFETY: the bytes outlive the layout, and are looked at when nothing runs.
    let layout = unsafe { Layout::new(vec![info], vec![storage], vec![copy]) }.unwrap();
    let positions: Vec<u32> = (0..1 << 20).step_by(3).collect();
    let (new, old) = (vec![2u8; positions.len()], vec![1u8; positions.len()]);
    let tensor: PreparedTensor =
        serde_json::from_value(json!({"name": "w", "dtype": "U8", "shape": [1 << 20],
        "changed": positions.len(), "positions": 64, "new": 128, "old": 192}))
        .unwrap();
    let at = places([positions.as_ptr() as u64, new.as_ptr() as u64, old.as_ptr() as u64]);
    let parts = part::Parts::new(&layout, &[tensor], at).unwrap();
    assert!(parts.blocks > 2 * 8);
    let expected: Vec<u8> = (0..1 << 20).map(|at| if at % 3 == 0 { 2 } else { 1 }).collect();
    // SAFETY: the arrays and the storage are as the parts say.
    assert_eq!(unsafe { host::run(&parts, host::Task::Write) }, Found::default());
    assert!(bytes == expected);
    // SAFETY: likewise.
    assert_eq!(unsafe { host::run(&parts, host::Task::TakeBack) }, Found::default());
    assert!(bytes.iter().all(|byte| *byte == 1));
}

#[test]
fn layouts_that_do_not_tell_where_an_element_lies_are_refused() {
    let storage = |dtype, bytes| LiveTensor { name: "s".into(), dtype, address: 0, bytes };
    let info = || TensorInfo { name: "t".into(), dtype: Dtype::Bf16, shape: vec![4, 6] };
    let try_copy = |size: &[u64], from: (u64, &[u64]), to: (u64, &[u64]), dtype| {
        let strides = |(offset, strides): (u64, &[u64])| Strides { offset, strides: strides.to_vec() };
        let (from, to) = (strides(from), strides(to));
        let copy = LiveCopy { tensor: 0, live: 0, size: size.to_vec(), from, to, table: None };
        // SAFETY: nothing is made with it.
        unsafe { Layout::new(vec![info()], vec![storage(dtype, 48)], vec![copy]) }
    };
    let whole: (u64, &[u64]) = (0, &[6, 1]);
    try_copy(&[4, 6], whole, whole, Dtype::Bf16).unwrap();
    for (size, from, to) in [
        (&[4, 6][..], whole, (1, &[6, 1][..])),
        (&[4, 6], (1, &[6, 1]), whole),
        (&[4, 6], whole, (0, &[1 << 40, 1 << 40])),
        (&[4, 6], (0, &[1, 1]), whole),
        (&[24], whole, whole),
        (&[0, 6], whole, whole),
        (&[1 << 63, 1 << 63], (0, &[1, 1 << 63]), (0, &[1, 1 << 63])),
        (&[2; 6], (0, &[1 << 10, 1 << 8, 1 << 6, 16, 4, 1]), (0, &[1, 2, 4, 8, 16, 32])),
    ] {
        let error = try_copy(size, from, to, Dtype::Bf16).unwrap_err();
        assert!(matches!(error, Error::Live { .. }), "{size:?}: {error}");
    }
    assert!(try_copy(&[4, 6], whole, whole, Dtype::F16).unwrap_err().to_string().contains("F16"));
}

#[test]
fn tables_that_do_not_fit_their_copy_are_refused() {
    let run = || Strides { offset: 0, strides: vec![1] };
    let try_table = |from: Dtype, to: Dtype, bytes: u64| {
        let info = TensorInfo { name: "t".into(), dtype: from, shape: vec![8] };
        let storage = LiveTensor { name: "s".into(), dtype: to, address: 0, bytes: 64 };
        let table = Some(LiveTable { address: 64, bytes });
        let copy = LiveCopy { tensor: 0, live: 0, size: vec![8], from: run(), to: run(), table };
        // SAFETY: nothing is made with it.
        unsafe { Layout::new(vec![info], vec![storage], vec![copy]) }
            .map(drop)
            .map_err(|error| error.to_string())
    };
    try_table(Dtype::Bf16, Dtype::F32, 1 << 18).unwrap();
    try_table(Dtype::F16, Dtype::F16, 1 << 17).unwrap();
    for (from, to, bytes, expected) in [
        (Dtype::Bf16, Dtype::F32, 1 << 17, "a table of 131072 bytes for F32"),
        (Dtype::Bf16, Dtype::F32, (1 << 18) + 4, "a table of 65536 values"),
        (Dtype::Bf16, Dtype::F64, 1 << 19, "values of 2 or 4 bytes"),
        (Dtype::F32, Dtype::Bf16, 1 << 17, "F32 has no 16 bits"),
    ] {
        let error = try_table(from, to, bytes).unwrap_err();
        assert!(error.contains("the copy of t in s") && error.contains(expected), "{error}");
    }
}

#[test]
fn values_that_a_table_makes_alike_are_written_and_taken_back() {
    // Weights of one value, which the table makes of both values of the tensor, and another element's.
    let mut bytes = vec![7u8; 8];
    let table: Vec<u8> = (0..=u16::MAX).flat_map(|value| if value < 2 { [7, 7] } else { [9, 9] }).collect();
    let storage =
        LiveTensor { name: "w".into(), dtype: Dtype::F16, address: bytes.as_mut_ptr() as u64, bytes: 8 };
    let info = TensorInfo { name: "w".into(), dtype: Dtype::Bf16, shape: vec![4] };
    let run = || Strides { offset: 0, strides: vec![1] };
    let table = Some(LiveTable { address: table.as_ptr() as u64, bytes: table.len() as u64 });
    let copy = LiveCopy { tensor: 0, live: 0, size: vec![4], from: run(), to: run(), table };
    // SAFETY: the bytes and the table outlive the layout, and are looked at when nothing runs.
    let layout = unsafe { Layout::new(vec![info], vec![storage], vec![copy]) }.unwrap();
    let (positions, new, old) = ([0u32, 2], [1u16, 2], [0u16, 1]);
    let tensor: PreparedTensor = serde_json::from_value(json!({"name": "w", "dtype": "BF16", "shape": [4],
        "changed": 2, "positions": 64, "new": 128, "old": 192}))
    .unwrap();
    let at = places([positions.as_ptr() as u64, new.as_ptr() as u64, old.as_ptr() as u64]);
    let parts = part::Parts::new(&layout, &[tensor], at).unwrap();
    // SAFETY: the arrays and the storage are as the parts say.
    assert_eq!(unsafe { host::run(&parts, host::Task::Write) }, Found::default());
    assert_eq!(bytes, [7, 7, 7, 7, 9, 9, 7, 7]);
    // SAFETY: likewise.
    assert_eq!(unsafe { host::run(&parts, host::Task::TakeBack) }, Found::default());
    assert_eq!(bytes, [7; 8]);
}
