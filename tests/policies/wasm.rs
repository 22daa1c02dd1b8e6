//! Encodes WebAssembly components for tests of the compiler.

/// A number in LEB128, the encoding of WebAssembly.
pub(crate) fn leb(mut number: usize) -> Vec<u8> {
    let mut bytes = Vec::new();
    while number >= 0x80 {
        bytes.push((number & 0x7f) as u8 | 0x80);
        number >>= 7;
    }
    bytes.push(number as u8);
    bytes
}

/// A section of a module or component: its id, its length, its content.
pub(crate) fn section(id: u8, content: &[u8]) -> Vec<u8> {
    [&[id][..], &leb(content.len()), content].concat()
}

/// A component that consists of one module with these sections.
pub(crate) fn component(sections: &[Vec<u8>]) -> Vec<u8> {
    let module = [&b"\0asm\x01\0\0\0"[..], &sections.concat()].concat();
    [b"\0asm\x0d\0\x01\0".to_vec(), section(1, &module)].concat()
}

/// A component with one function that contains this many calls. Each call costs the compiler more
/// than a kilobyte.
pub(crate) fn bomb(calls: usize) -> Vec<u8> {
    let body = [&[0][..], &[0x10, 0].repeat(calls), &[0x0b]].concat();
    let code = [&[1][..], &leb(body.len()), &body].concat();
    component(&[
        section(1, &[1, 0x60, 0, 0]),
        section(3, &[1, 0]),
        section(10, &code),
    ])
}
