//! Patterns that an operator writes for client ids and keys: `*` is any bytes, `?` is one byte, and `\` before a
//! byte means that byte.

/// Whether `pattern` names `text`. It takes at most as many steps as the product of their lengths.
pub(super) fn matches(pattern: &[u8], text: &[u8]) -> bool {
    let (mut at, mut place) = (0, 0);
    // Behind the last `*`, and where in the text it ended last.
    let mut star: Option<(usize, usize)> = None;
    while place < text.len() {
        match pattern.get(at) {
            Some(b'*') => {
                at += 1;
                star = Some((at, place));
                continue;
            }
            Some(b'?') => {
                (at, place) = (at + 1, place + 1);
                continue;
            }
            Some(b'\\') if pattern.get(at + 1) == Some(&text[place]) => {
                (at, place) = (at + 2, place + 1);
                continue;
            }
            Some(byte) if *byte == text[place] && *byte != b'\\' => {
                (at, place) = (at + 1, place + 1);
                continue;
            }
            _ => {}
        }
        // It does not go on here: let the last `*` take one byte more.
        let Some((behind, ended)) = star else {
            return false;
        };
        star = Some((behind, ended + 1));
        (at, place) = (behind, ended + 1);
    }
    pattern[at..].iter().all(|byte| *byte == b'*')
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn patterns_name_what_they_say() {
        let yes = [
            ("", ""),
            ("*", ""),
            ("*", "abc"),
            ("a*c", "abbbc"),
            ("a*b*c", "axxbyybzc"),
            ("?b?", "abc"),
            ("press-*", "press-7"),
            ("*-7", "press-7-7"),
            ("a\\*", "a*"),
        ];
        for (pattern, text) in yes {
            assert!(
                matches(pattern.as_bytes(), text.as_bytes()),
                "{pattern} {text}"
            );
        }
        let no = [
            ("", "a"),
            ("a", ""),
            ("?", ""),
            ("a*c", "abbbd"),
            ("press-*", "pres-7"),
            ("a\\*", "ab"),
            ("ab", "abc"),
        ];
        for (pattern, text) in no {
            assert!(
                !matches(pattern.as_bytes(), text.as_bytes()),
                "{pattern} {text}"
            );
        }
    }
}
