//! Encodes requests as RESP3 arrays of bulk strings (protocol, section 3).

pub fn array<A: AsRef<[u8]>>(arguments: &[A]) -> Vec<u8> {
    let mut out = format!("*{}\r\n", arguments.len()).into_bytes();
    for argument in arguments {
        out.extend(bulk(argument.as_ref()));
    }
    out
}

pub fn bulk(bytes: &[u8]) -> Vec<u8> {
    let mut out = format!("${}\r\n", bytes.len()).into_bytes();
    out.extend_from_slice(bytes);
    out.extend_from_slice(b"\r\n");
    out
}

/// Decodes a SCAN answer: the keys, and the token if there are more keys.
pub fn scan(payload: &[u8]) -> (Vec<Vec<u8>>, Option<Vec<u8>>) {
    let mut at = payload;
    let parts = count(&mut at, b'*');
    assert!(
        parts == 1 || parts == 2,
        "a SCAN answer has one or two parts"
    );
    let keys = (0..count(&mut at, b'*')).map(|_| string(&mut at)).collect();
    let token = (parts == 2).then(|| string(&mut at));
    assert!(at.is_empty(), "bytes after the SCAN answer");
    (keys, token)
}

fn count(at: &mut &[u8], mark: u8) -> usize {
    let end = at.windows(2).position(|w| w == b"\r\n").unwrap();
    let (line, rest) = at.split_at(end);
    assert_eq!(
        line.first(),
        Some(&mark),
        "in {:?}",
        at.escape_ascii().to_string()
    );
    *at = &rest[2..];
    std::str::from_utf8(&line[1..]).unwrap().parse().unwrap()
}

fn string(at: &mut &[u8]) -> Vec<u8> {
    let n = count(at, b'$');
    let (bytes, rest) = at.split_at(n);
    assert_eq!(&rest[..2], b"\r\n");
    *at = &rest[2..];
    bytes.to_vec()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn arrays_encode_and_scan_answers_decode() {
        assert_eq!(array(&["GET", "k"]), b"*2\r\n$3\r\nGET\r\n$1\r\nk\r\n");
        let (keys, token) = scan(b"*2\r\n*1\r\n$1\r\nk\r\n$2\r\n\r\n\r\n");
        assert_eq!(keys, [b"k"]);
        assert_eq!(token.unwrap(), b"\r\n");
    }
}
