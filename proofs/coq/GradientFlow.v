(* T7: a backward chain v' = v + F_j v of linear branches with |F_j v| <= l_j |v|, in any normed space; skipping a
   branch means passing v on unchanged. Bias of skipping, exponential bound, and what survives. *)
From Coq Require Import Reals Lra Psatz Lia.
From Coquelicot Require Import Coquelicot.
From LCSB Require Import FinSum IdentityPath.
Open Scope R_scope.

Section Chain.
Variable V : NormedModule R_AbsRing.
Variables (F : nat -> V -> V) (l : nat -> R).
Hypothesis F_minus : forall j v w, F j (minus v w) = minus (F j v) (F j w).
Hypothesis F_bound : forall j v, norm (F j v) <= l j * norm v.
Hypothesis l_nonneg : forall j, 0 <= l j.

(* the true chain and the chain that keeps only the branches with kept j = true *)
Fixpoint chain (kept : nat -> bool) (n : nat) (v : V) : V :=
  match n with
  | O => v
  | S k => let w := chain kept k v in if kept k then plus w (F k w) else w
  end.
Let all (j : nat) := true.
Let weight (kept : nat -> bool) j := 1 + (if kept j then l j else 0).

Lemma weight_prod_pos kept n : 0 <= pprod (weight kept) n.
Proof.
  induction n as [|n IH]; simpl; [lra|]. apply Rmult_le_pos; [exact IH|]. unfold weight.
  specialize (l_nonneg n). destruct (kept n); lra.
Qed.

Lemma chain_size n v : norm (chain all n v) <= pprod (weight all) n * norm v.
Proof.
  induction n as [|n IH]; simpl; [lra|]. pose proof (norm_triangle (chain all n v) (F n (chain all n v))).
  pose proof (F_bound n (chain all n v)). unfold weight at 2. simpl.
  pose proof (l_nonneg n). pose proof (norm_ge_0 (chain all n v)). nra.
Qed.

(* skipping: the bias is at most (prod over all - prod over the kept) *)
Theorem skip_bias kept n v :
  norm (minus (chain all n v) (chain kept n v)) <= (pprod (weight all) n - pprod (weight kept) n) * norm v.
Proof.
  induction n as [|n IH].
  - simpl. unfold minus. rewrite plus_opp_r, norm_zero. lra.
  - simpl. set (a := chain all n v) in *. set (c := chain kept n v) in *.
    pose proof (l_nonneg n) as Ln. pose proof (norm_ge_0 v). unfold weight at 2 4. simpl.
    destruct (kept n).
    + replace (minus (plus a (F n a)) (plus c (F n c))) with (plus (minus a c) (F n (minus a c))).
      * pose proof (norm_triangle (minus a c) (F n (minus a c))). pose proof (F_bound n (minus a c)). nra.
      * rewrite F_minus. unfold minus. rewrite opp_plus, <- !plus_assoc. f_equal.
        rewrite !plus_assoc. f_equal. apply plus_comm.
    + replace (minus (plus a (F n a)) c) with (plus (minus a c) (F n a)).
      * pose proof (norm_triangle (minus a c) (F n a)). pose proof (F_bound n a).
        pose proof (chain_size n v) as Z. fold a in Z. nra.
      * unfold minus. rewrite <- !plus_assoc. f_equal. apply plus_comm.
Qed.

(* all skipped: prod (1 + l) - 1 <= exp (sum l) - 1 *)
Lemma none_is_v n v : chain (fun _ => false) n v = v.
Proof. induction n as [|n IH]; [reflexivity|]. simpl. exact IH. Qed.

Theorem identity_bias n v : norm (minus (chain all n v) v) <= (pprod (fun j => 1 + l j) n - 1) * norm v /\
  pprod (fun j => 1 + l j) n - 1 <= exp (psum l n) - 1.
Proof.
  split.
  - pose proof (skip_bias (fun _ => false) n v) as B. rewrite none_is_v in B.
    replace (pprod (weight (fun _ => false)) n) with 1 in B; [exact B|].
    clear. induction n as [|n IH]; [reflexivity|]. simpl. rewrite <- IH. unfold weight. ring.
  - pose proof (product_exp l n) as E.
    assert (A : forall j, Rabs (l j) = l j) by (intros; apply Rabs_pos_eq, l_nonneg).
    rewrite (psum_ext (fun j => Rabs (l j)) l) in E by auto.
    replace (pprod (fun j => 1 + l j) n) with (pprod (fun j => 1 + Rabs (l j)) n); [exact E|].
    clear E. induction n as [|n IH]; [reflexivity|]. simpl. rewrite IH, A. reflexivity.
Qed.

(* gradient flow: with contractions above, at least prod (1 - l_j) of the norm arrives *)
Theorem gradient_flow n v : (forall j, l j < 1) -> pprod (fun j => 1 - l j) n * norm v <= norm (chain all n v).
Proof.
  intros H1. induction n as [|n IH]; simpl; [lra|]. set (a := chain all n v) in *.
  pose proof (norm_triangle (plus a (F n a)) (opp (F n a))) as T. rewrite norm_opp, <- plus_assoc, plus_opp_r, plus_zero_r in T.
  pose proof (F_bound n a). specialize (H1 n). pose proof (l_nonneg n). pose proof (norm_ge_0 a).
  apply Rle_trans with ((1 - l n) * norm a); [|lra].
  replace (pprod (fun j => 1 - l j) n * (1 - l n) * norm v) with ((1 - l n) * (pprod (fun j => 1 - l j) n * norm v)) by ring.
  apply Rmult_le_compat_l; lra.
Qed.

(* the bias in units of the true gradient *)
Theorem relative_bias n v : (forall j, l j < 1) ->
  norm (minus v (chain all n v)) <= (/ pprod (fun j => 1 - l j) n - 1) * norm (chain all n v).
Proof.
  intros H1. assert (P : forall k, 0 < pprod (fun j => 1 - l j) k).
  { induction k as [|k IH]; simpl; [lra|]. specialize (H1 k). apply Rmult_lt_0_compat; lra. }
  assert (P1 : forall k, pprod (fun j => 1 - l j) k <= 1).
  { induction k as [|k IH]; simpl; [lra|]. pose proof (l_nonneg k). pose proof (P k). nra. }
  induction n as [|n IH].
  - simpl. unfold minus. rewrite plus_opp_r, norm_zero. lra.
  - simpl. set (a := chain all n v) in *. set (z := plus a (F n a)).
    pose proof (P n) as Pn. specialize (H1 n). pose proof (norm_ge_0 a) as Na.
    pose proof (norm_triangle z (opp (F n a))) as T. unfold z at 1 in T.
    rewrite norm_opp, <- plus_assoc, plus_opp_r, plus_zero_r in T.
    pose proof (F_bound n a) as Fa.
    assert (A : (1 - l n) * norm a <= norm z) by lra.
    assert (B : norm (minus v z) <= norm (minus v a) + norm (F n a)).
    { replace (minus v z) with (plus (minus v a) (opp (F n a)))
        by (unfold minus, z; rewrite opp_plus, plus_assoc; reflexivity).
      eapply Rle_trans; [apply norm_triangle|]. rewrite norm_opp. lra. }
    apply Rle_trans with ((/ pprod (fun j => 1 - l j) n - (1 - l n)) * norm a); [lra|].
    assert (D : norm a <= norm z / (1 - l n)).
    { apply Rmult_le_reg_l with (1 - l n); [lra|]. replace ((1 - l n) * (norm z / (1 - l n))) with (norm z) by (field; lra). exact A. }
    assert (I1 : 1 <= / pprod (fun j => 1 - l j) n).
    { rewrite <- Rinv_1 at 1. apply Rinv_le_contravar; [exact Pn|apply P1]. }
    apply Rle_trans with ((/ pprod (fun j => 1 - l j) n - (1 - l n)) * (norm z / (1 - l n))).
    + apply Rmult_le_compat_l; [|exact D]. specialize (l_nonneg n). lra.
    + right. field. split; lra.
Qed.
End Chain.

(* where it fails: below b = -1 a step along the identity surrogate x ascends *)
Theorem identity_ascends : forall x a b eta, x <> 0 -> b < -1 -> 0 < eta ->
  loss x b a < loss x b (a - eta * x).
Proof.
  intros x a b eta Hx Hb He. unfold loss, y1.
  assert (0 < x ^ 2) by (rewrite <- Rsqr_pow2; apply Rlt_0_sqr; exact Hx).
  replace ((1 + b) * ((1 + (a - eta * x)) * x)) with ((1 + b) * ((1 + a) * x) + eta * (- (1 + b) * x ^ 2)) by ring.
  assert (0 < eta * (- (1 + b) * x ^ 2)) by (apply Rmult_lt_0_compat; [lra|apply Rmult_lt_0_compat; lra]). lra.
Qed.
