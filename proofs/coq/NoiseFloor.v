(* T10, one coordinate of curvature lam under EMA momentum with gradient noise of variance s2: the stationary
   variance of x. pxx, pxm, pmm: stationary second moments; pxn: that of x and the new momentum. *)
From Coq Require Import Reals Lra Psatz.
Open Scope R_scope.

(* m' = beta m + (1 - beta)(lam x + xi),  x' = x - eta m',  and the moments of (x', m') are those of (x, m) *)
Definition stationary (eta beta lam s2 pxx pxm pmm : R) : Prop :=
  let pxn := beta * pxm + (1 - beta) * lam * pxx in
  let pnn := beta ^ 2 * pmm + 2 * beta * (1 - beta) * lam * pxm + (1 - beta) ^ 2 * (lam ^ 2 * pxx + s2) in
  pmm = pnn /\ pxm = pxn - eta * pnn /\ pxx = pxx - 2 * eta * pxn + eta ^ 2 * pnn.

Theorem noise_floor : forall eta beta lam s2 pxx pxm pmm, 0 < eta -> 0 <= beta < 1 -> 0 < lam ->
  eta * (1 - beta) * lam < 2 * (1 + beta) -> stationary eta beta lam s2 pxx pxm pmm ->
  pxx = eta * s2 * (1 + beta) / (lam * (2 * (1 + beta) - eta * (1 - beta) * lam)).
Proof.
  intros eta beta lam s2 pxx pxm pmm He Hb Hl Hlt [H1 [H2 H3]].
  set (pxn := beta * pxm + (1 - beta) * lam * pxx) in *.
  rewrite <- H1 in H2, H3.
  assert (N : pxn = eta * pmm / 2).
  { apply Rmult_eq_reg_l with (2 * eta); [|lra]. replace (2 * eta * (eta * pmm / 2)) with (eta ^ 2 * pmm) by field. lra. }
  assert (M : pxm = - (eta * pmm / 2)) by lra.
  assert (X : pxx = eta * pmm * (1 + beta) / (2 * (1 - beta) * lam)).
  { apply Rmult_eq_reg_l with ((1 - beta) * lam); [|apply Rgt_not_eq, Rmult_lt_0_compat; lra].
    replace ((1 - beta) * lam * (eta * pmm * (1 + beta) / (2 * (1 - beta) * lam))) with (eta * pmm * (1 + beta) / 2)
      by (field; lra).
    unfold pxn in N. rewrite M in N. lra. }
  assert (P : pmm * (2 * (1 + beta) - eta * (1 - beta) * lam) = 2 * (1 - beta) * s2).
  { rewrite M, X in H1.
    replace (beta ^ 2 * pmm + 2 * beta * (1 - beta) * lam * - (eta * pmm / 2)
      + (1 - beta) ^ 2 * (lam ^ 2 * (eta * pmm * (1 + beta) / (2 * (1 - beta) * lam)) + s2))
      with (beta ^ 2 * pmm - beta * (1 - beta) * lam * eta * pmm
      + (1 - beta) * lam * eta * pmm * (1 + beta) / 2 + (1 - beta) ^ 2 * s2) in H1 by (field; lra).
    apply Rmult_eq_reg_l with (1 - beta); [|lra]. lra. }
  assert (D : 0 < 2 * (1 + beta) - eta * (1 - beta) * lam) by lra.
  rewrite X. replace pmm with (2 * (1 - beta) * s2 / (2 * (1 + beta) - eta * (1 - beta) * lam));
    [field; repeat split; lra|].
  apply Rmult_eq_reg_r with (2 * (1 + beta) - eta * (1 - beta) * lam); [|lra]. rewrite P. field. lra.
Qed.
